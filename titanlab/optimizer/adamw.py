"""optimizer=adamw: torch's AdamW, fused; torchao's arithmetic where new values are rounded stochastically."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from titanlab.optimizer.adamw_schema import AdamW
from titanlab.optimizer.groups import groups_by_decay


def build(config: AdamW, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over the parameters that this rank holds; matrices decay, vectors do not.

    The learning rate is set before every step by the loop, from the schedule.
    """
    in_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters.values())
    if in_bf16 and config.rounding != "nearest":
        # Imports torchao, three seconds that others do not pay.
        from titanlab.optimizer.low_bit import LowBitAdamW

        return LowBitAdamW(config, parameters)
    return torch.optim.AdamW(
        groups_by_decay(parameters.values(), config.weight_decay),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )
