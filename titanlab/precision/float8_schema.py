"""Configs of the float8 options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from titanlab.costs.account import part_shape
from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.precision.account import Product
from titanlab.precision.contract import Precision
from titanlab.precision.float8_base_schema import Float8


@dataclass(kw_only=True)
class TorchaoFloat8(Float8):
    """The three recipes of torchao's `float8`."""

    layer_class: ClassVar[str] = "torchao.float8.float8_linear.Float8Linear"

    def implementation(self) -> Precision:
        """Torchao's layers replace linear layers."""
        from titanlab.precision.float8 import Float8Layers

        return Float8Layers(self)


@option("precision", "float8_tensorwise")
@dataclass(kw_only=True)
class Float8Tensorwise(TorchaoFloat8):
    """Float8 with one scale for each input, weight and gradient: the fastest kernels, and the coarsest rounding.

    Attributes:
        all_gather: FSDP2 gathers the weights in float8, with half the bytes of bfloat16; the scales of all weights are
            computed together after each optimizer step.
    """

    kind: str = "float8_tensorwise"
    all_gather: bool = True

    recipe: ClassVar[str] = "tensorwise"

    @property
    def gathers_float8(self) -> bool:
        """See `all_gather`."""
        return self.all_gather

    def check(self, setting: Setting) -> None:
        """See `Float8.check`.

        Raises:
            ConfigError: also if weights cannot be gathered in float8.
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


@option("precision", "float8_rowwise")
@dataclass(kw_only=True)
class Float8Rowwise(TorchaoFloat8):
    """Float8 with a power of two as scale for each row and column of a product: finer than tensorwise."""

    kind: str = "float8_rowwise"

    recipe: ClassVar[str] = "rowwise"
    # Each operand has scales by row for one product and by column for another: twice read 2, read 2, write 1.
    cast_bytes: ClassVar[float] = 10.0
    cast_kernels: ClassVar[int] = 4


@option("precision", "float8_rowwise_with_gw_hp")
@dataclass(kw_only=True)
class Float8RowwiseWithGwHp(TorchaoFloat8):
    """Rowwise float8, but gradients of weights are multiplied in bfloat16: the finest of the three."""

    kind: str = "float8_rowwise_with_gw_hp"

    recipe: ClassVar[str] = "rowwise_with_gw_hp"
    multiplies_tokens: ClassVar[bool] = False
    cast_bytes: ClassVar[float] = 6.0
    cast_kernels: ClassVar[int] = 2

    def product(self) -> Product:
        """The gradient of the weight is multiplied in bfloat16."""
        return replace(super().product(), weight_gradient="bfloat16")
