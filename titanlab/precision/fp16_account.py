"""What precision=fp16 declares about itself."""

from __future__ import annotations

from titanlab.precision.account import DTYPES, Formats
from titanlab.precision.fp16_schema import Fp16


def account(config: Fp16) -> Formats:
    """float16 where it computes, 32 bits where it rests, and where it sums unless the config says otherwise."""
    return Formats(
        master="float32", compute="float16", reduce=DTYPES[config.reduce], fp32_parts=tuple(config.fp32_parts)
    )
