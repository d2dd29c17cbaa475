"""What precision=fp64 declares about itself, without torch."""

from __future__ import annotations

from tiny_gpt.fp64_schema import Fp64
from titanlab.precision.account import Formats


def account(config: Fp64) -> Formats:
    """Which number format where, by torch's names."""
    return Formats(master="float64", compute="float64", reduce="float64")
