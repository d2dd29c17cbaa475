"""precision=fp16: computation in float16 with float32 master weights and a scaled loss."""

from __future__ import annotations

import torch

from titanlab.precision.cast import Cast
from titanlab.precision.fp16_schema import Fp16
from titanlab.precision.loss_scale import DynamicLossScale, LossScale


class ScaledCast(Cast):
    """Casts, and scales the loss so that gradients stay within float16's range: 2⁻²⁴ to 65,504."""

    def __init__(self, config: Fp16) -> None:
        self._config = config

    def loss_scale(self, device: torch.device) -> LossScale:
        """A scale on `device`; a constant one changes by factors of 1."""
        config = self._config
        return DynamicLossScale(
            device=device,
            init_scale=config.init_scale,
            growth_factor=config.growth_factor if config.dynamic else 1.0,
            growth_interval=config.growth_interval,
            backoff_factor=config.backoff_factor if config.dynamic else 1.0,
            # A constant scale has no smallest value.
            min_scale=config.min_scale if config.dynamic else 0.0,
            max_skips=config.max_skips,
        )
