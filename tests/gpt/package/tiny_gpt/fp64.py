"""precision=fp64: what a precision has to answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tiny_gpt.fp64_account import account
from tiny_gpt.fp64_schema import Fp64
from titanlab.precision.dtypes import Dtypes


def convert(config: Fp64, model: nn.Module, device: torch.device) -> nn.Module:
    """Modules that take the place of others; here none."""
    return model


def dtypes(config: Fp64) -> Dtypes:
    """In which dtype parameters rest, compute, and are summed over processes."""
    return Dtypes.of(account(config))


def tensor_styles(config: Fp64) -> Mapping[str, Any]:
    """How layers multiply under tensor parallelism, by style; here as they always do."""
    return {}
