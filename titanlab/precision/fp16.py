"""precision=fp16: float16 compute over 32-bit masters, and a loss that is scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titanlab.precision.dtypes import Dtypes
from titanlab.precision.fp16_account import account
from titanlab.precision.fp16_schema import Fp16
from titanlab.precision.loss_scale import DynamicLossScale, LossScale


def convert(config: Fp16, model: nn.Module, device: torch.device) -> nn.Module:
    """The model as it is: parameters are cast where they are gathered, see parallelism/shard.py."""
    return model


def tensor_styles(config: Fp16) -> Mapping[str, Any]:
    """No style of its own: layers multiply as they are."""
    return {}


def dtypes(config: Fp16) -> Dtypes:
    """float16 where it computes, 32 bits where it rests."""
    return Dtypes.of(account(config))


def loss_scale(config: Fp16, device: torch.device) -> LossScale:
    """What keeps small gradients from vanishing below 2⁻²⁴, and large ones from passing 65,504."""
    return DynamicLossScale(
        device=device,
        init_scale=config.init_scale,
        growth_factor=config.growth_factor if config.dynamic else 1.0,
        growth_interval=config.growth_interval,
        backoff_factor=config.backoff_factor if config.dynamic else 1.0,
        # One that stays has no smallest value to arrive at.
        min_scale=config.min_scale if config.dynamic else 0.0,
        max_skips=config.max_skips,
    )
