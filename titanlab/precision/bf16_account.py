"""What precision=bf16 declares about itself."""

from __future__ import annotations

from titanlab.precision.account import DTYPES, Formats
from titanlab.precision.bf16_schema import Bf16


def account(config: Bf16) -> Formats:
    """bfloat16 where it computes, 32 bits where it rests, and where it sums unless the config says otherwise."""
    return Formats(
        master="float32", compute="bfloat16", reduce=DTYPES[config.reduce], fp32_parts=tuple(config.fp32_parts)
    )
