"""precision=bf16: bfloat16 compute over 32-bit masters."""

from __future__ import annotations

import torch
from torch import nn

from titanlab.precision.bf16_schema import Bf16
from titanlab.precision.dtypes import Dtypes


def convert(config: Bf16, model: nn.Module) -> nn.Module:
    """The model as it is: parameters are cast where they are gathered, see parallelism/shard.py."""
    return model


def dtypes(config: Bf16) -> Dtypes:
    """bfloat16 where it computes, 32 bits where it sums and rests."""
    return Dtypes(master=torch.float32, compute=torch.bfloat16, reduce=torch.float32)
