"""What precision=fp32 declares about itself."""

from __future__ import annotations

from titanlab.precision.account import Formats
from titanlab.precision.fp32_schema import Fp32


def account(config: Fp32) -> Formats:
    """32 bits everywhere."""
    return Formats(master="float32", compute="float32", reduce="float32")
