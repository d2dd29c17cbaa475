"""precision=fp64: parameters are cast, and no module is replaced, so that the config is all."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.techniques.precision.contract import Formats, PrecisionConfig


@option("precision", "fp64")
@dataclass(frozen=True, kw_only=True)
class Fp64(PrecisionConfig):
    """Everything in 64-bit floating point: what fp32 itself can be held to."""

    kind: str = "fp64"

    def formats(self) -> Formats:
        """Which number format where, by torch's names."""
        return Formats(master="float64", compute="float64", reduce="float64")
