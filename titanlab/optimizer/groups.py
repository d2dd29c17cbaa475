"""Param groups with and without weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def groups_by_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Param groups of matrices, which decay, and of vectors, which do not; empty groups are left out."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
