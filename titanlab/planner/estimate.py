"""What one run of a recipe would take: hours, memory of a device, bytes of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from titanlab.costs.config_key import key_of
from titanlab.errors import ConfigError
from titanlab.planner.machine import machine_of
from titanlab.planner.memory import most_memory
from titanlab.planner.reserved import reserved_bytes
from titanlab.planner.search.plan import MARGIN
from titanlab.planner.step_time import step_time
from titanlab.planner.stored import Sharding, added, stored_pieces
from titanlab.recipe.recipe import Recipe

MEMORY_ERROR = 0.47
"""The share by which estimated memory was too high for the published run with the largest such error
(docs/planner-accuracy.md)."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one run takes.

    Attributes:
        hours: of its steps; not of its start, validation and checkpoints.
        reserved_bytes: of the device that needs most.
        limit_bytes: of a device that runs may reserve; None: not known.
        checkpoint_bytes: of one checkpoint, with parameters and optimizer state of all ranks.
    """

    hours: float
    reserved_bytes: int
    limit_bytes: float | None
    checkpoint_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the memory of a device suffices, as far as it is known."""
        return self.limit_bytes is None or self.reserved_bytes <= self.limit_bytes

    @property
    def cannot_fit(self) -> bool:
        """Whether a device's memory would not suffice even if the estimate were too high by `MEMORY_ERROR`."""
        return self.limit_bytes is not None and self.reserved_bytes > self.limit_bytes * (1 + MEMORY_ERROR)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values by the names of the fields."""
        return asdict(self)


def estimate_of(recipe: Recipe) -> Estimate | None:
    """The estimate for a resolved recipe; None: nothing is known of its devices, or its CPUs were not measured."""
    estimate = estimate_or_reason(recipe)
    return estimate if isinstance(estimate, Estimate) else None


def estimate_or_reason(recipe: Recipe) -> Estimate | str:
    """The estimate for a resolved recipe, or in a few words why there is none."""
    if recipe.cluster.accelerator != "cuda" and recipe.cluster.memory_gb_per_second is None:
        return "these CPUs were not measured (titanlab plan --measure)"
    try:
        machine = machine_of(recipe)
    except ConfigError as error:
        return error.problem
    reserved = reserved_bytes(recipe, machine, most_memory(recipe))
    whole = Sharding(key_of(recipe.model), key_of(recipe.precision), key_of(recipe.optimizer), 1, 1)
    saved = added(stored_pieces(whole).values())
    limit = machine.memory_bytes * (1 - MARGIN)
    return Estimate(
        hours=step_time(recipe, machine).seconds * recipe.training.steps / 3600,
        reserved_bytes=reserved,
        limit_bytes=None if math.isinf(limit) else limit,
        checkpoint_bytes=saved.parameters + saved.optimizer,
    )
