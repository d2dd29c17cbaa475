"""Config of precision=bf16."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.costs.setting import Setting
from titanlab.options import option
from titanlab.precision.parts_schema import Parts, check_bf16, check_reduce


@option("precision", "bf16")
@dataclass(kw_only=True)
class Bf16(Parts):
    """Forward and backward in bfloat16; parameters and optimizer state in 32 bits.

    Attributes:
        reduce: what gradients are summed in over processes and microbatches: `fp32`, or `bf16`, which sends half as
            much and rounds every sum to 8 bits.
    """

    kind: str = "bf16"
    reduce: str = field(default="fp32", metadata={"before": "fp32"})

    def __post_init__(self) -> None:
        check_reduce(self.reduce, ("fp32", "bf16"), "is no dtype that bf16 gradients are summed in")

    def check(self, setting: Setting) -> None:
        """The device knows bfloat16, and the model the parts.

        Raises:
            ConfigError: one of them does not.
        """
        check_bf16(setting, self.kind)
        super().check(setting)
