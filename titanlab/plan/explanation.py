"""The full estimate for one recipe: memory by rank, time by part, bytes of collectives, the pipeline's timeline.

`estimate_of` is the short form: hours, memory of a device, bytes of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titanlab.costs import Coordinate, TrafficRow, step_traffic
from titanlab.errors import ConfigError
from titanlab.plan.block_time import model_time
from titanlab.plan.machine import Machine, machine_of
from titanlab.plan.memory import (
    ITEMS,
    RankMemory,
    added,
    memory,
    most_memory,
    reserved_bytes,
    stored_pieces,
)
from titanlab.plan.pipeline_time import durations_of, rank_stages, simulated_time
from titanlab.plan.search import MARGIN, whole_model
from titanlab.plan.step_time import StepTime, step_time
from titanlab.recipe import Recipe, check_all_but_data, step_of
from titanlab.techniques.schedule.action import Timeline, simulate

MEMORY_ERROR = 0.40
"""The share by which estimated memory was too high for the published run with the largest such error
(docs/planner-accuracy.md)."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The time, device memory and checkpoint size that a run is estimated to need.

    Attributes:
        hours: hours of the run's steps, without start, validation and checkpoints.
        reserved_bytes: reserved memory of the device that needs the most.
        limit_bytes: bytes of a device that a run may reserve; None: not known.
        checkpoint_bytes: bytes of one checkpoint, with parameters and optimizer state of all ranks.
    """

    hours: float
    reserved_bytes: int
    limit_bytes: float | None
    checkpoint_bytes: int

    @property
    def fits(self) -> bool:
        return self.limit_bytes is None or self.reserved_bytes <= self.limit_bytes

    @property
    def cannot_fit(self) -> bool:
        """Whether a device has too little memory even if the estimate is too high by `MEMORY_ERROR`."""
        return self.limit_bytes is not None and self.reserved_bytes > self.limit_bytes * (1 + MEMORY_ERROR)

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def estimate_of(recipe: Recipe) -> Estimate | None:
    """The estimate for a resolved recipe; None: its devices are unknown, or its CPUs were not measured."""
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
    pieces = stored_pieces(recipe.model, recipe.precision, recipe.optimizer, 1, 1, freeze=recipe.training.freeze)
    saved = added(pieces.values())
    limit = machine.memory_bytes * (1 - MARGIN)
    return Estimate(
        hours=step_time(recipe, machine).seconds * recipe.training.steps / 3600,
        reserved_bytes=reserved,
        limit_bytes=None if math.isinf(limit) else limit,
        checkpoint_bytes=saved.parameters + saved.optimizer,
    )


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The full estimate for one recipe.

    Attributes:
        ranks: memory of each rank of the pipeline.
        time: time of a step; every action of a pipeline is simulated.
        traffic: communication of one rank, the first on every axis, in a step before the optimizer.
        timeline: simulated actions of the pipeline, in seconds; None: there is no pipeline.
    """

    recipe: Recipe
    machine: Machine
    ranks: tuple[RankMemory, ...]
    time: StepTime
    traffic: Sequence[TrafficRow]
    timeline: Timeline | None


def explain(recipe: Recipe) -> Explanation:
    """The full estimate for a resolved recipe.

    Raises:
        ConfigError: the recipe breaks a rule, or nothing is known of its machine.
    """
    check_all_but_data(recipe)
    machine = machine_of(recipe)
    return Explanation(
        recipe=recipe,
        machine=machine,
        ranks=memory(recipe),
        time=step_time(recipe, machine, pipeline=simulated_time),
        traffic=step_traffic(step_of(recipe), Coordinate()),
        timeline=timeline_of(recipe, machine),
    )


def timeline_of(recipe: Recipe, machine: Machine) -> Timeline | None:
    """The simulated timeline of a recipe's pipeline, in seconds; None: the recipe has no pipeline."""
    ranks, times = recipe.layout.pipeline, model_time(recipe, machine)
    _, stages = rank_stages(times, recipe.schedule, recipe.parallelism.split, ranks)
    if stages is None:
        return None
    actions = recipe.schedule.actions(ranks=ranks, microbatches=recipe.microbatches)
    return simulate(actions, stages.placement, durations_of(stages.stages))


def memory_rows(explanation: Explanation) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each item with its GB on each rank; then rows of the sums and of the fullest moment."""
    ranks = explanation.ranks
    headings = ["GB", *(f"rank {rank.rank}" for rank in ranks)] if len(ranks) > 1 else ["", "GB"]
    machine = explanation.machine
    process = f", and {machine.process_bytes / 1e9:.2f}" if machine.process_bytes else ""
    sizes: dict[str, list[float]] = {item: [rank.items[item] for rank in ranks] for item in ITEMS}
    sizes = {item: bytes_ for item, bytes_ in sizes.items() if any(bytes_)}
    sizes["allocated"] = [rank.allocated for rank in ranks]
    reserved = [reserved_bytes(explanation.recipe, machine, rank) for rank in ranks]
    sizes[f"reserved (×{machine.allocator_excess:.3g}{process})"] = [*reserved]
    rows = [[item, *(f"{size / 1e9:.2f}" for size in bytes_)] for item, bytes_ in sizes.items()]
    return headings, [*rows, ["largest at", *(rank.moment for rank in ranks)]]


def time_rows(time: StepTime) -> list[list[str]]:
    rows = [
        [name, f"{seconds:.4g}", f"{100 * seconds / time.seconds:.1f}%"]
        for name, seconds in time.parts.items()
        if seconds
    ]
    return [*rows, ["step", f"{time.seconds:.4g}", "100.0%"]]


def traffic_rows(rows: Sequence[TrafficRow]) -> list[list[str]]:
    return [[row.axis, row.kind, f"{row.count:,}", f"{row.bytes:,}", f"{row.wire_bytes:,}"] for row in rows]


def explanation_values(explanation: Explanation) -> dict[str, Any]:
    """The estimate as plain values, in bytes and seconds."""
    timeline, time = explanation.timeline, explanation.time
    return {
        "layout": explanation.recipe.layout.label,
        "device": explanation.machine.name,
        "memory_bytes": explanation.machine.memory_bytes,
        "ranks": [
            {
                "rank": rank.rank,
                "moment": rank.moment,
                "items": dict(rank.items),
                "allocated_bytes": rank.allocated,
                "reserved_bytes": reserved_bytes(explanation.recipe, explanation.machine, rank),
            }
            for rank in explanation.ranks
        ],
        **asdict(whole_model(explanation.recipe)),
        "step_seconds": time.seconds,
        "parts": dict(time.parts),
        "tokens_per_second_per_device": time.tokens_per_second,
        "mfu": None if math.isnan(time.mfu) else time.mfu,
        "traffic": [asdict(row) for row in explanation.traffic],
        "bubble_share": None if timeline is None else timeline.bubble_share,
        "peak_in_flight": None if timeline is None else timeline.peak_in_flight,
    }
