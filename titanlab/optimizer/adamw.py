"""optimizer=adamw: torch's AdamW, fused."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from titanlab.optimizer.adamw_schema import AdamW


def build(config: AdamW, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over the parameters that this rank holds; matrices decay, vectors do not.

    The learning rate is set before every step by the loop, from the schedule.
    """
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )
