"""precision=fp32: the reference that every other precision is held to."""

from __future__ import annotations

import torch
from torch import nn

from titanlab.precision.dtypes import Dtypes
from titanlab.precision.fp32_schema import Fp32


def convert(config: Fp32, model: nn.Module) -> nn.Module:
    """The model as it is: no module is exchanged."""
    return model


def dtypes(config: Fp32) -> Dtypes:
    """32 bits everywhere."""
    return Dtypes(master=torch.float32, compute=torch.float32, reduce=torch.float32)
