"""Configs of precision=bf16 and precision=bf16_full."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.costs.setting import Setting
from titanlab.options import option
from titanlab.precision.account import DTYPES, Formats
from titanlab.precision.contract import PrecisionConfig
from titanlab.precision.parts_schema import Parts, check_bf16, check_reduce

_UNKNOWN_REDUCE = "is no dtype that bf16 gradients are summed in"


@option("precision", "bf16")
@dataclass(kw_only=True)
class Bf16(Parts):
    """Forward and backward in bfloat16; parameters and optimizer state in float32.

    Attributes:
        reduce: dtype of sums of gradients over processes and microbatches: `fp32`, or `bf16`, which sends half the
            bytes and rounds every sum to 8 bits.
    """

    kind: str = "bf16"
    reduce: str = field(default="fp32", metadata={"before": "fp32"})

    def __post_init__(self) -> None:
        check_reduce(self.reduce, ("fp32", "bf16"), _UNKNOWN_REDUCE)

    def formats(self) -> Formats:
        """bfloat16 for computation; float32 for stored values and, by default, for sums of gradients."""
        return Formats(
            master="float32", compute="bfloat16", reduce=DTYPES[self.reduce], fp32_parts=tuple(self.fp32_parts)
        )

    def check(self, setting: Setting) -> None:
        """Check that the device supports bfloat16, and that the model has the parts.

        Raises:
            ConfigError: one of these is not true.
        """
        check_bf16(setting, self.kind)
        super().check(setting)


@option("precision", "bf16_full")
@dataclass(kw_only=True)
class Bf16Full(PrecisionConfig):
    """All stored values in bfloat16: parameters, gradients and the states of the optimizer.

    Attributes:
        reduce: dtype of sums of gradients over processes and microbatches, before they are stored in bfloat16: `fp32`
            or `bf16`.
    """

    kind: str = "bf16_full"
    reduce: str = "fp32"

    def __post_init__(self) -> None:
        check_reduce(self.reduce, ("fp32", "bf16"), _UNKNOWN_REDUCE)

    def formats(self) -> Formats:
        """bfloat16 everywhere, except by default for sums of gradients."""
        return Formats(master="bfloat16", compute="bfloat16", reduce=DTYPES[self.reduce])

    def check(self, setting: Setting) -> None:
        """Check that the device supports bfloat16.

        Raises:
            ConfigError: it does not.
        """
        check_bf16(setting, self.kind)
