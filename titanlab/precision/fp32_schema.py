"""Config of precision=fp32."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.options import option
from titanlab.precision.account import Formats
from titanlab.precision.contract import PrecisionConfig
from titanlab.precision.parts_schema import check_reduce


@option("precision", "fp32")
@dataclass(kw_only=True)
class Fp32(PrecisionConfig):
    """Everything in float32.

    Attributes:
        reduce: dtype of sums of gradients: only `fp32`.
    """

    kind: str = "fp32"
    reduce: str = field(default="fp32", metadata={"before": "fp32"})

    def __post_init__(self) -> None:
        check_reduce(self.reduce, ("fp32",), "fp32 is what other precisions are held to, and rounds nothing")

    def formats(self) -> Formats:
        """float32 everywhere."""
        return Formats(master="float32", compute="float32", reduce="float32")
