"""The contract of an optimizer: a torch-free config, and an implementation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.optimizer.schedule_schema import Schedule

if TYPE_CHECKING:
    import torch
    from torch import nn


class OptimizerConfig(Protocol):
    """Config of an optimizer; `Scheduled` has the fields that all share.

    Attributes:
        lr: peak learning rate.
        schedule: of the learning rate, as a share of the peak.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: str
    lr: float
    schedule: Schedule

    def check(self, setting: Setting) -> None:
        """Check that the rest of the recipe fits this optimizer.

        Raises:
            ConfigError: it does not fit.
        """
        return  # the default; mypy takes an empty body for an abstract method

    @abstractmethod
    def implementation(self) -> OptimizerFactory:
        """The factory of the optimizer."""


class OptimizerFactory(Protocol):
    """Implementation of an optimizer."""

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Make an optimizer for this rank's parameters, by name: plain tensors or DTensors.

        The training loop sets the learning rate of every param group before each step.
        """


@dataclass(kw_only=True)
class Scheduled(OptimizerConfig):
    """The fields that all optimizers share. A dataclass that inherits from it defines `kind` and `implementation`."""

    lr: float = 3e-4
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError("optimizer.lr", self.lr, "must be positive and finite", "try 3e-4")
