"""The contract of an optimizer: a torch-free config with the schedule of the learning rate, and an implementation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from titanlab.costs import OptionConfig
from titanlab.errors import ConfigError
from titanlab.options import OUTSIDE_STEP

if TYPE_CHECKING:
    import torch
    from torch import nn


# Default of `warmup_steps` in a run that has at least as many steps.
WARMUP_STEPS = 200
# Form of the decay → function of the decay's progress (0 to 1); it returns the rate: 1 is the peak, 0 is the floor.
DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up, then a constant rate, then decay.

    Attributes:
        warmup_steps: steps in which the rate rises linearly from 0; null: 200, or a tenth of a run with fewer steps.
        decay_fraction: share of all steps, at the end, in which the rate falls; 0: it does not fall.
        decay: form of the decay: `linear`, `cosine`, or `sqrt` (1 − √progress, arXiv 2405.18392).
        floor: the rate at the last step, as a share of the peak.
    """

    warmup_steps: int | None = field(default=None, metadata={"least": 0, "cure": "try 0"})
    decay_fraction: float = 0.8
    decay: str = field(default="cosine", metadata={"choices": tuple(DECAYS)})
    floor: float = 0.1

    def __post_init__(self) -> None:
        for name in ("decay_fraction", "floor"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"optimizer.schedule.{name}", value, "must lie between 0 and 1", "try 0.1")

    def warmup(self, steps: int) -> int:
        if self.warmup_steps is not None:
            return self.warmup_steps
        return WARMUP_STEPS if steps >= WARMUP_STEPS else max(1, steps // 10)


def rate_factor(schedule: Schedule, *, step: int, steps: int) -> float:
    """The learning rate of step `step` (counted from 1) of `steps`, as a share of the peak."""
    warmup_steps = schedule.warmup(steps)
    if step <= warmup_steps:
        return step / warmup_steps
    decay_steps = round(steps * schedule.decay_fraction)
    # The decay never starts inside the warm-up.
    decay_start = max(steps - decay_steps, warmup_steps)
    if step <= decay_start:
        return 1.0
    progress = (step - decay_start) / (steps - decay_start)
    return schedule.floor + (1 - schedule.floor) * DECAYS[schedule.decay](progress)


# Bytes of the update counter that most optimizers keep for each parameter.
STEP_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A parameter, as one rank stores it.

    Attributes:
        shape: shape of the whole parameter.
        part: shape of the part that the rank stores.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    element_bytes: int

    @property
    def part_bytes(self) -> int:
        return math.prod(self.part) * self.element_bytes


class OptimizerConfig(OptionConfig, Protocol):
    """Config of an optimizer; `Scheduled` has the fields that all share.

    Attributes:
        schedule: schedule of the learning rate, as a share of the peak.
        tolerances: relative tolerances of `parameter`, `loss` and `grad_norm` after a few steps in fp32 proofs, if the
            optimizer rounds more than the gradients do.
    """

    lr: float
    schedule: Schedule
    tolerances: ClassVar[Mapping[str, float]] = {}

    def reduced(self, *, least_eps: float) -> OptimizerConfig:
        """This optimizer for the small model with which proofs compare layouts; by default unchanged.

        Args:
            least_eps: lower bound of eps: a gradient that consists only of rounding errors must not give a full update.
        """
        return self

    @abstractmethod
    def state_bytes(self, parameter: Stored) -> int:
        """Bytes of state that this optimizer keeps for the part of a parameter that one rank stores."""

    def update_flops(self, parameter: Stored) -> float:
        """FLOPs of products in bfloat16 that an update takes on one rank; by default none: it only moves memory."""
        return 0.0

    @abstractmethod
    def implementation(self) -> OptimizerFactory:
        """The factory of the optimizer."""


class OptimizerFactory(Protocol):
    """Builds the optimizer that a config describes."""

    @abstractmethod
    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Make an optimizer for this rank's parameters, by name: plain tensors or DTensors.

        The training loop sets the learning rate of every param group before each step.
        """


@dataclass(frozen=True, kw_only=True)
class Scheduled(OptimizerConfig):
    """The fields that all optimizers share. A dataclass that inherits from it defines `kind` and `implementation`."""

    lr: float = field(default=3e-4, metadata=OUTSIDE_STEP)
    schedule: Schedule = field(default_factory=Schedule, metadata=OUTSIDE_STEP)

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError("optimizer.lr", self.lr, "must be positive and finite", "try 3e-4")


def groups_by_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Param groups of matrices, which decay, and of vectors, which do not; empty groups are left out."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
