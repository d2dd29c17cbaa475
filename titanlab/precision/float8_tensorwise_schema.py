"""Config of precision=float8_tensorwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from titanlab.costs.account import ModelAccount
from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.precision.float8_account import part_shape
from titanlab.precision.float8_schema import Float8


@option("precision", "float8_tensorwise")
@dataclass(kw_only=True)
class Float8Tensorwise(Float8):
    """Float8 with one scale for each input, weight and gradient: the fastest kernels, and the coarsest rounding.

    Attributes:
        all_gather: FSDP2 gathers the weights in float8, half of bfloat16's bytes; the scales of all weights are
            computed together after each optimizer step.
    """

    kind: str = "float8_tensorwise"
    all_gather: bool = True

    recipe: ClassVar[str] = "tensorwise"

    def check(self, setting: Setting) -> None:
        """See `Float8.check`.

        Raises:
            ConfigError: also where weights cannot be gathered in float8.
        """
        super().check(setting)
        if not self.all_gather:
            return
        if setting.cpu_offload:
            rule = "computes scales where the weights rest, and with cpu_offload that is not where they are gathered"
            raise ConfigError("precision.all_gather", True, rule, "try false, or parallelism.cpu_offload=false")
        ranks = setting.layout.fsdp
        for name, shape in self.conversion(setting.model).converted.items():
            rows = part_shape(setting.model, name, shape, setting.layout.tensor)[0]
            if rows % ranks:
                rule = f"cannot cut the {rows} rows that a process has of {name} into {ranks} equal parts"
                raise ConfigError("precision.all_gather", True, rule, "try false")

    def float8_gathered(self, model: ModelAccount) -> frozenset[str]:
        """See `Float8.float8_gathered`: all converted weights, if asked for."""
        return (
            frozenset(f"{name}.weight" for name in self.conversion(model).converted) if self.all_gather else frozenset()
        )
