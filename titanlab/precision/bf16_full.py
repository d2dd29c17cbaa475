"""precision=bf16_full: parameters, gradients and optimizer states in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titanlab.precision.bf16_full_account import account
from titanlab.precision.bf16_full_schema import Bf16Full
from titanlab.precision.dtypes import Dtypes


def convert(config: Bf16Full, model: nn.Module, device: torch.device) -> nn.Module:
    """The model as it is: it was made in bfloat16."""
    return model


def tensor_styles(config: Bf16Full) -> Mapping[str, Any]:
    """No style of its own: layers multiply as they are."""
    return {}


def dtypes(config: Bf16Full) -> Dtypes:
    """bfloat16 everywhere, but for the sums of gradients unless the config says otherwise."""
    return Dtypes.of(account(config))
