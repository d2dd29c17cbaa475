"""optimizer=adamw: torch's fused AdamW, or torchao's arithmetic if new values are rounded stochastically."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from titanlab.techniques.optimizer.adamw_schema import AdamW
from titanlab.techniques.optimizer.contract import groups_by_decay


class AdamWFactory:
    """AdamW; matrices decay, vectors do not."""

    def __init__(self, config: AdamW) -> None:
        self._config = config

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """See `OptimizerFactory`."""
        config = self._config
        in_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters.values())
        if in_bf16 and config.rounding != "nearest":
            # Imported here: it imports torchao, which takes 3 s.
            from titanlab.techniques.optimizer.low_bit import LowBitAdamW

            return LowBitAdamW(config, parameters)
        return torch.optim.AdamW(
            groups_by_decay(parameters.values(), config.weight_decay),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )
