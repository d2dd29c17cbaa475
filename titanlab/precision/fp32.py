"""precision=fp32: the reference that every other precision is held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titanlab.precision.dtypes import Dtypes
from titanlab.precision.fp32_account import account
from titanlab.precision.fp32_schema import Fp32


def convert(config: Fp32, model: nn.Module, device: torch.device) -> nn.Module:
    """The model as it is: no module is exchanged."""
    return model


def tensor_styles(config: Fp32) -> Mapping[str, Any]:
    """No style of its own: layers multiply as they are."""
    return {}


def dtypes(config: Fp32) -> Dtypes:
    """32 bits everywhere."""
    return Dtypes.of(account(config))
