"""What precision=bf16_full declares about itself."""

from __future__ import annotations

from titanlab.precision.account import DTYPES, Formats
from titanlab.precision.bf16_full_schema import Bf16Full


def account(config: Bf16Full) -> Formats:
    """bfloat16 everywhere, but for the sums of gradients unless the config says otherwise."""
    return Formats(master="bfloat16", compute="bfloat16", reduce=DTYPES[config.reduce])
