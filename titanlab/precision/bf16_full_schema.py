"""Config of precision=bf16_full."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs.setting import Setting
from titanlab.options import option
from titanlab.precision.parts_schema import check_bf16, check_reduce


@option("precision", "bf16_full")
@dataclass(kw_only=True)
class Bf16Full:
    """Everything at rest in bfloat16: parameters, gradients and the states of the optimizer.

    Attributes:
        reduce: what gradients are summed in over processes and microbatches, before they are kept in bfloat16: `fp32`
            or `bf16`.
    """

    kind: str = "bf16_full"
    reduce: str = "fp32"

    def __post_init__(self) -> None:
        check_reduce(self.reduce, ("fp32", "bf16"), "is no dtype that bf16 gradients are summed in")

    def check(self, setting: Setting) -> None:
        """The device knows bfloat16.

        Raises:
            ConfigError: it does not.
        """
        check_bf16(setting, self.kind)
