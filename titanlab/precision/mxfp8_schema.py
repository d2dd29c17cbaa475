"""Config of precision=mxfp8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.precision.contract import Precision
from titanlab.precision.float8_base_schema import Float8


@option("precision", "mxfp8")
@dataclass(kw_only=True)
class Mxfp8(Float8):
    """Float8 with a power of two as scale for every 32 neighbouring elements, the format of Blackwell GPUs.

    (OCP Microscaling Formats specification 1.0; arXiv 2506.08027.) It is a prototype in torchao. An older GPU emulates
    it only with `emulate=true`.
    """

    kind: str = "mxfp8"

    capability: ClassVar[tuple[int, int]] = (10, 0)
    multiple: ClassVar[int] = 32
    format: ClassVar[str] = "mxfp8"
    layer_class: ClassVar[str] = "titanlab.precision.mxfp8.Mxfp8Linear"
    emulates_on_gpu: ClassVar[bool] = False
    splits_products: ClassVar[bool] = False
    # Scales along both dims of an operand: each time read 2 and write 1, and the scales.
    cast_bytes: ClassVar[float] = 6.1
    cast_kernels: ClassVar[int] = 2

    def check(self, setting: Setting) -> None:
        """See `Float8.check`.

        Raises:
            ConfigError: also if tokens do not fill blocks, emulated or not; and with fused projections, or schedules
                that compute gradients of weights later, which torchao's prototype cannot.
        """
        super().check(setting)
        if setting.splits_backward:
            schedule = setting.kinds["schedule"]
            rule = f"computes gradients of weights with those of inputs, which schedule={schedule} wants apart"
            cure = "try schedule=interleaved_1f1b, or precision=float8_rowwise"
            raise ConfigError("precision", self.kind, rule, cure)
        if setting.model.joined:
            rule = "multiplies the weights of several layers as one, which torchao's prototype of mxfp8 does not take"
            raise ConfigError("model.fused", "true", rule, "try false, or precision=float8_rowwise")
        self.check_tokens(setting)

    def implementation(self) -> Precision:
        """`Mxfp8Linear` replaces linear layers."""
        from titanlab.precision.mxfp8 import Mxfp8Layers

        return Mxfp8Layers(self)
