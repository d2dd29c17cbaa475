"""Config of precision=fp16."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.precision.account import DTYPES, Formats
from titanlab.precision.contract import Precision
from titanlab.precision.parts_schema import Parts, check_reduce

LARGEST = 2.0**127


@option("precision", "fp16")
@dataclass(kw_only=True)
class Fp16(Parts):
    """Forward and backward in float16 with a scaled loss, so that gradients do not vanish; float32 master weights.

    Attributes:
        reduce: dtype of sums of gradients over processes and microbatches: `fp32` or `fp16`.
        init_scale: the first scale of the loss. If it and the two factors are powers of two, scaling does not round.
        dynamic: whether the scale grows and shrinks; otherwise it is constant.
        growth_factor, growth_interval: after `growth_interval` steps in a row without an overflow the scale is
            multiplied by `growth_factor`.
        backoff_factor: factor of the scale after an overflow; the step with the overflow updates no parameter.
        min_scale: the smallest scale; an overflow at this scale ends the run.
        max_skips: the run ends after this many steps in a row without an update.
    """

    kind: str = "fp16"
    reduce: str = "fp32"
    init_scale: float = 65536.0
    dynamic: bool = True
    growth_factor: float = 2.0
    growth_interval: int = 2000
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_skips: int = 20

    def __post_init__(self) -> None:
        check_reduce(self.reduce, ("fp32", "fp16"), "is no dtype that fp16 gradients are summed in")
        if not 0 < self.init_scale <= LARGEST:
            rule = "must be positive and at most 2¹²⁷, where float32 ends"
            raise ConfigError("precision.init_scale", self.init_scale, rule, "try 65536")
        if not (math.isfinite(self.growth_factor) and self.growth_factor > 1):
            rule = "must be above 1 for the scale to grow"
            raise ConfigError("precision.growth_factor", self.growth_factor, rule, "try 2, or dynamic=false")
        if not 0 < self.backoff_factor < 1:
            rule = "must lie between 0 and 1 for the scale to shrink"
            raise ConfigError("precision.backoff_factor", self.backoff_factor, rule, "try 0.5, or dynamic=false")
        for name, cure in (("growth_interval", "try 2000"), ("max_skips", "try 20")):
            if getattr(self, name) < 1:
                raise ConfigError(f"precision.{name}", getattr(self, name), "must be at least 1", cure)
        if not 0 < self.min_scale <= self.init_scale:
            rule = f"must be positive and at most init_scale={self.init_scale:g}"
            raise ConfigError("precision.min_scale", self.min_scale, rule, f"try {min(1.0, self.init_scale):g}")

    def formats(self) -> Formats:
        """float16 for computation; float32 for stored values and, by default, for sums of gradients."""
        return Formats(
            master="float32", compute="float16", reduce=DTYPES[self.reduce], fp32_parts=tuple(self.fp32_parts)
        )

    def implementation(self) -> Precision:
        """Casts, and a loss scale."""
        from titanlab.precision.fp16 import ScaledCast

        return ScaledCast(self)
