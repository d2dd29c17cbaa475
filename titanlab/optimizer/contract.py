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


# Bytes of the number of updates, which most optimizers keep for each parameter.
STEP_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A parameter, as one rank stores it.

    Attributes:
        name: in the model.
        shape: of the whole parameter.
        part: of what the rank stores of it.
        element_bytes: of a stored element.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    element_bytes: int

    @property
    def part_bytes(self) -> int:
        """Bytes of the rank's part."""
        return math.prod(self.part) * self.element_bytes


class OptimizerConfig(Protocol):
    """Config of an optimizer; `Scheduled` has the fields that all share.

    Attributes:
        lr: peak learning rate.
        schedule: of the learning rate, as a share of the peak.
        tolerances: of `parameter`, `loss` and `grad_norm` after a few steps in proofs in fp32, relative, where the
            optimizer rounds more than the gradients do.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: str
    lr: float
    schedule: Schedule
    tolerances: ClassVar[Mapping[str, float]] = {}

    def check(self, setting: Setting) -> None:
        """Check that the rest of the recipe fits this optimizer.

        Raises:
            ConfigError: it does not fit.
        """
        return  # the default; mypy takes an empty body for an abstract method

    def reduced(self, *, least_eps: float) -> OptimizerConfig:
        """The same optimizer for a small model whose layouts are compared; by default this one.

        Args:
            least_eps: the least number, added to the denominator of an update, that keeps a gradient of nothing but
                rounding from moving a parameter as far as any other.
        """
        return self

    @abstractmethod
    def state_bytes(self, parameter: Stored) -> int:
        """Bytes of state that this optimizer keeps for the part of a parameter that one rank stores."""

    @abstractmethod
    def implementation(self) -> OptimizerFactory:
        """The factory of the optimizer."""


class OptimizerFactory(Protocol):
    """Implementation of an optimizer."""

    @abstractmethod
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
