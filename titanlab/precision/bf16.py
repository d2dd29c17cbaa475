"""precision=bf16: bfloat16 compute over 32-bit masters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titanlab.precision.bf16_account import account
from titanlab.precision.bf16_schema import Bf16
from titanlab.precision.dtypes import Dtypes


def convert(config: Bf16, model: nn.Module, device: torch.device) -> nn.Module:
    """The model as it is: parameters are cast where they are gathered, see parallelism/shard.py."""
    return model


def tensor_styles(config: Bf16) -> Mapping[str, Any]:
    """No style of its own: layers multiply as they are."""
    return {}


def dtypes(config: Bf16) -> Dtypes:
    """bfloat16 where it computes, 32 bits where it rests."""
    return Dtypes.of(account(config))
