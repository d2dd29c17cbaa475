"""precision=fp32, bf16 and bf16_full: casts only. FSDP2 casts parameters when it gathers them."""

from __future__ import annotations

import torch
from torch import nn

from titanlab.precision.loss_scale import LossScale


class Cast:
    """Does nothing in its methods: `parallelism/shard.py` casts. Other precisions inherit methods they do not need."""

    def convert(self, model: nn.Module, device: torch.device) -> None:
        """Does not change the model."""

    def loss_scale(self, device: torch.device) -> LossScale:
        """The loss is not scaled."""
        return LossScale()

    def after_update(self, model: nn.Module) -> None:
        """Does nothing."""
