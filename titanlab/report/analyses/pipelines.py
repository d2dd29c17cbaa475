"""Schedules of a pipeline: their idle time and what they keep, and the pipelines of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe.recipe import from_mapping
from titanlab.report.frames import sweep_frame
from titanlab.schedule.action import Kind
from titanlab.schedule.contract import PipelineSchedule
from titanlab.schedule.timeline import Timeline, simulate
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.system.files import user_path

if TYPE_CHECKING:
    from pandas import DataFrame

# A backward pass takes twice as long as a forward pass, and each of its halves half of that.
DURATIONS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
# Its order comes from a file.
_OF_A_FILE = "csv"
_PIPELINES = (
    *("run", "name", "layout.label", "schedule", "ranks", "stages", "microbatches", "bubble_percent"),
    *("peak_in_flight", "step_seconds", "busy_seconds", "oversubscribed"),
)


def timeline_of(
    schedule: str, *, ranks: int, microbatches: int, durations: Mapping[Kind, float] = DURATIONS, transfer: float = 0.0
) -> Timeline:
    """The simulated timeline of one schedule.

    Args:
        schedule: option of the group, such as `1f1b`.
        ranks: of the pipeline.
        microbatches: of a step.
        durations: of one microbatch through all layers of a rank, by kind of action, in any unit.
        transfer: time to send a tensor from one rank to another, in the same unit.

    Raises:
        ConfigError: there is no such schedule, or it does not allow these ranks and microbatches.
    """
    known = schedules()
    if schedule not in known:
        raise ConfigError("schedule", schedule, "is no schedule without a file", f"known: {', '.join(known)}")
    return _simulated(known[schedule], ranks, microbatches, durations, transfer)


def schedules() -> dict[str, PipelineSchedule]:
    """Every schedule by name, with its own defaults."""
    by_name: dict[str, PipelineSchedule] = {}
    for kind, option in discover()["schedule"].items():
        if kind not in (None, _OF_A_FILE):
            by_name[str(kind)] = option.schema()
    return dict(sorted(by_name.items()))


def schedules_frame(
    ranks: Iterable[int] = (4,), microbatches: Iterable[int] = (8,), *, transfer: float = 0.0
) -> DataFrame:
    """One row for each schedule, number of ranks and number of microbatches.

    A schedule that does not allow a combination has no row for it.

    Args:
        ranks: numbers of ranks to compare.
        microbatches: numbers of microbatches of a step to compare.
        transfer: time of a transfer, where the forward pass of a microbatch through all layers of a rank takes 1.

    Returns:
        Columns: `schedule`, `ranks`, `microbatches`, `stages_per_rank`, `step` (its length, in forward passes),
        `bubble_percent` (idle share of all ranks' time), `peak_in_flight` (most microbatches that a rank keeps).
    """
    import pandas as pd

    microbatches = list(microbatches)
    rows = []
    for name, schedule in schedules().items():
        for size in ranks:
            for count in microbatches:
                try:
                    timeline = _simulated(schedule, size, count, DURATIONS, transfer)
                except ConfigError:
                    continue
                rows.append(
                    {
                        "schedule": name,
                        "ranks": size,
                        "microbatches": count,
                        "stages_per_rank": len(timeline.placement) // size,
                        "step": timeline.duration,
                        "bubble_percent": 100 * timeline.bubble_share,
                        "peak_in_flight": max(timeline.peak_in_flight),
                    }
                )
    names = ["schedule", "ranks", "microbatches", "stages_per_rank", "step", "bubble_percent", "peak_in_flight"]
    return pd.DataFrame(rows, columns=names)


def pipelines_frame(path: Path | str) -> DataFrame:
    """One row for each run of a sweep that has a pipeline and is done.

    `busy_seconds` is the measured step without the bubble of the simulation: a pipeline without idle time would take so
    long. What a step spends on the optimizer and on data is in it.

    Args:
        path: a sweep's folder.

    Returns:
        Columns: `run`, `name`, `layout.label`, `schedule`, `ranks`, `stages`, `microbatches`, `bubble_percent`,
        `peak_in_flight`, `step_seconds` (measured), `busy_seconds`, `oversubscribed` (the speed says nothing).

    Raises:
        ConfigError: the path is no sweep's folder.
    """
    import pandas as pd

    sweep = SweepFolder(user_path(path).absolute())
    runs = sweep_frame(sweep.path)
    chosen = runs[(runs.outcome == "done") & (runs["layout.pipeline"] > 1)]
    rows: list[dict[str, Any]] = []
    for row in chosen.to_dict("records"):
        run = sweep.run(str(row["run"]))
        recipe = from_mapping(run.config(int(row["attempt"])))
        size, count = recipe.layout.pipeline, recipe.microbatches
        timeline = _simulated(recipe.schedule, size, count, DURATIONS, 0.0)
        rows.append(
            {
                **{name: row[name] for name in ("run", "name", "layout.label", "schedule", "oversubscribed")},
                "ranks": size,
                "stages": len(timeline.placement),
                "microbatches": count,
                "bubble_percent": 100 * timeline.bubble_share,
                "peak_in_flight": max(timeline.peak_in_flight),
                "step_seconds": row["step_seconds"],
                "busy_seconds": row["step_seconds"] * (1 - timeline.bubble_share),
            }
        )
    return pd.DataFrame(rows, columns=list(_PIPELINES))


def _simulated(
    schedule: PipelineSchedule, ranks: int, microbatches: int, durations: Mapping[Kind, float], transfer: float
) -> Timeline:
    placement = schedule.placement(ranks=ranks)
    stages_of_a_rank = len(placement) / ranks
    # Durations are those of all layers of a rank; its stages share them.
    of_a_stage = {kind: duration / stages_of_a_rank for kind, duration in durations.items()}
    orders = schedule.actions(ranks=ranks, microbatches=microbatches)
    return simulate(orders, placement, of_a_stage, transfer=transfer)
