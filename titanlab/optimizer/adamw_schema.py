"""Config of optimizer=adamw."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from titanlab.errors import ConfigError
from titanlab.optimizer.schedule_schema import Scheduled
from titanlab.options import option


@option("optimizer", "adamw")
@dataclass(kw_only=True)
class AdamW(Scheduled):
    """Adam with decoupled weight decay (arXiv 1711.05101).

    Attributes:
        lr: peak learning rate.
        betas: decay of the averages of gradient and squared gradient.
        eps: added to the denominator.
        weight_decay: applied to parameters of two or more dimensions; norms and biases have none.
    """

    kind: str = "adamw"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError("optimizer.betas", self.betas, "must be two numbers in [0, 1)", "try [0.9,0.95]")
        if not 0 < self.eps < math.inf:
            raise ConfigError("optimizer.eps", self.eps, "must be positive and finite", "try 1e-8")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError("optimizer.weight_decay", self.weight_decay, "must be finite and not negative", "try 0.1")
