"""What a sweep shows, as data frames: scaling, memory by item, pipelines, differences of losses, ranking."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.plan import ITEMS, machine_of, most_memory, reserved_bytes
from titanlab.recipe import from_mapping
from titanlab.report.figures.style import records_of
from titanlab.report.frames import sweep_frame
from titanlab.sweep import SweepFolder, groups, rank, ranking_lines
from titanlab.system import user_path
from titanlab.techniques.schedule import contract
from titanlab.techniques.schedule.action import DURATIONS, Kind, Timeline
from titanlab.techniques.schedule.contract import PipelineSchedule

if TYPE_CHECKING:
    from pandas import DataFrame

    from titanlab.sweep import RecipeRuns


# Recipes with the same values in these columns differ in their layout only.
_ALIKE = (
    *("model", "layers", "dim", "seq_len", "precision", "ac", "compile", "optimizer", "data"),
    *("accelerator", "device"),
)
SCALING_COLUMNS = (
    *("recipe", "layout.label", "world", "reference", "tokens_per_second", "tokens_per_second_all"),
    *("speedup", "efficiency_percent", "mfu_percent", "oversubscribed", "runs"),
)


def scaling_frame(runs: DataFrame, *, weak: bool = False) -> DataFrame:
    """One row for each recipe whose speed was measured, compared with the same recipe on fewer devices.

    The reference of a recipe is the fastest recipe (per device) on the smallest number of devices that differs from it
    in the layout only. `speedup` compares the tokens per second of all devices with the reference's.
    `efficiency_percent` compares those of one device: 100 % if twice the devices are twice as fast. If there were more
    processes than cores, `oversubscribed` is true, and the speed says nothing about the layout.

    Args:
        runs: the frame of `titanlab.report.frames.sweep_frame`.
        weak: the batch grows with the devices: compare recipes with the same batch per device. Otherwise compare
            recipes with the same global batch (strong scaling).

    Returns:
        The columns `SCALING_COLUMNS`. `reference` is the label of a recipe, `tokens_per_second` the speed of one
        device, and `runs` the number of runs that were averaged.
    """
    import pandas as pd

    rows = [row for family in scaling_families(groups(records_of(runs)), weak=weak) for row in family]
    return pd.DataFrame(rows, columns=list(SCALING_COLUMNS))


def scaling_key(group: RecipeRuns, *, weak: bool) -> tuple[Any, ...]:
    """A key that is equal for recipes that differ only in the number of devices and the layout."""
    row = group.rows[0]
    batch = row["global_batch"] / row["world"] if weak else row["global_batch"]
    return (*(row[name] for name in _ALIKE), batch)


def scaling_families(compared: Sequence[RecipeRuns], *, weak: bool) -> list[list[dict[str, Any]]]:
    """Rows of `scaling_frame` by family (equal `scaling_key`), fewest devices first; `group`: the recipe's runs."""
    families: dict[tuple[Any, ...], list[tuple[RecipeRuns, float]]] = {}
    for group in compared:
        if speed := group.typical("tokens_per_second"):
            families.setdefault(scaling_key(group, weak=weak), []).append((group, speed))

    def row(group: RecipeRuns, speed: float, reference: RecipeRuns, base: float) -> dict[str, Any]:
        return {
            "group": group,
            "recipe": group.label,
            "layout.label": group.layout,
            "world": group.world,
            "reference": reference.label,
            "tokens_per_second": speed,
            "tokens_per_second_all": speed * group.world,
            "speedup": speed * group.world / (base * reference.world),
            "efficiency_percent": 100 * speed / base,
            "mfu_percent": group.typical("mfu_percent"),
            "oversubscribed": group.is_oversubscribed,
            "runs": len(group.values("tokens_per_second")),
        }

    rows = []
    for members in families.values():
        least = min(group.world for group, _ in members)
        best = max((member for member in members if member[0].world == least), key=lambda member: member[1])
        rows.append([row(*member, *best) for member in sorted(members, key=lambda member: member[0].world)])
    return rows


_GIB = 1024**3
ITEM = "item."
MEMORY_COLUMNS = (
    *("run", "name", "layout.label", "world", "precision", "ac", "pipeline_rank", "moment"),
    *(f"{ITEM}{name}" for name in ITEMS),
    *("tensors_gib", "estimated_gib", "measured_gib", "error_percent"),
)


def memory_frame(path: Path | str) -> DataFrame:
    """One row for each run: the planner's memory account of the rank that needs the most, and the measured memory.

    The account is computed from the recipe alone: the items are the tensors that exist at the moment of a step at which
    their sum is largest. `estimated_gib` adds the allocator's overhead; on a CPU also the memory of a process without
    tensors, because the measurement there is the resident memory of the process.

    Returns:
        The columns `MEMORY_COLUMNS`; `moment` is `loss`, `backward`, `end` or `optimizer`, `item.NAME` in GiB,
        `tensors_gib` their sum, and `measured_gib` empty if a run is not done.

    Raises:
        ConfigError: the path is not the folder of a sweep.
    """
    import pandas as pd

    sweep = SweepFolder(user_path(path).absolute())
    runs = sweep_frame(sweep.path)
    rows = []
    for row in runs[runs.run.notna() & runs["layout.label"].notna()].to_dict("records"):
        run = sweep.run(str(row["run"]))
        recipe = from_mapping(run.config(run.newest_attempt() or None))
        try:
            most, machine = most_memory(recipe), machine_of(recipe)
        except ConfigError:
            continue  # The planner does not know the devices.
        estimated = reserved_bytes(recipe, machine, most) / _GIB
        measured = row["memory_gib"] if row["outcome"] == "done" else None
        rows.append(
            {
                **row,
                "pipeline_rank": most.rank,
                "moment": most.moment,
                **{f"{ITEM}{item}": most.items[item] / _GIB for item in ITEMS},
                "tensors_gib": most.allocated / _GIB,
                "estimated_gib": estimated,
                "measured_gib": measured,
                "error_percent": 100 * (estimated / measured - 1) if measured else None,
            }
        )
    numbers = [name for name in MEMORY_COLUMNS if name.endswith(("_gib", "_percent"))]
    return pd.DataFrame(rows, columns=list(MEMORY_COLUMNS)).astype(dict.fromkeys(numbers, float))


# The kind of a schedule whose order of actions comes from a file.
_OF_A_FILE = "csv"
_IDLE = ("bubble_percent", "peak_in_flight")
_PIPELINES = (
    *("run", "name", "layout.label", "schedule", "ranks", "stages", "microbatches", *_IDLE),
    *("step_seconds", "busy_seconds", "oversubscribed"),
)


def timeline_of(
    schedule: str, *, ranks: int, microbatches: int, durations: Mapping[Kind, float] = DURATIONS, transfer: float = 0.0
) -> Timeline:
    """The simulated timeline of one schedule.

    Args:
        schedule: an option of the group `schedule`, such as `1f1b`.
        durations: the time of one microbatch in all layers of a rank, by kind of action, in any unit.
        transfer: time to send a tensor from one rank to another, in the same unit.

    Raises:
        ConfigError: there is no such schedule, or it does not allow these ranks and microbatches.
    """
    known = schedules()
    if schedule not in known:
        raise ConfigError("schedule", schedule, "is not a built-in schedule", f"known: {', '.join(known)}")
    return contract.timeline_of(
        known[schedule], ranks=ranks, microbatches=microbatches, durations=durations, transfer=transfer
    )


def schedules() -> dict[str, PipelineSchedule]:
    options = discover()["schedule"].items()
    by_name = {str(kind): option.schema() for kind, option in options if kind not in (None, _OF_A_FILE)}
    return dict(sorted(by_name.items()))


def schedules_frame(
    ranks: Iterable[int] = (4,), microbatches: Iterable[int] = (8,), *, transfer: float = 0.0
) -> DataFrame:
    """One row for each schedule, number of ranks and number of microbatches.

    A schedule that does not allow a combination has no row for it.

    Args:
        transfer: time of a transfer; the forward pass of a microbatch through all layers of a rank takes 1.

    Returns:
        Columns: `schedule`, `ranks`, `microbatches`, `stages_per_rank`, `step` (its length, in forward passes),
        `bubble_percent` (idle share of all ranks' time), `peak_in_flight` (most microbatches that a rank keeps).
    """
    import pandas as pd

    rows = []
    for (name, schedule), size, count in itertools.product(schedules().items(), ranks, microbatches):
        with contextlib.suppress(ConfigError):
            timeline = contract.timeline_of(schedule, ranks=size, microbatches=count, transfer=transfer)
            own = {"schedule": name, "ranks": size, "microbatches": count, "step": timeline.duration}
            rows.append({**own, "stages_per_rank": len(timeline.placement) // size, **_idle(timeline)})
    names = ["schedule", "ranks", "microbatches", "stages_per_rank", "step", *_IDLE]
    return pd.DataFrame(rows, columns=names)


def pipelines_frame(path: Path | str) -> DataFrame:
    """One row for each run of a sweep whose pipeline has several ranks and whose outcome is `done`.

    `busy_seconds` is the measured time of a step without the share that is idle in the simulation: the time that a
    pipeline without idle ranks would take. It includes the optimizer and waiting for data.

    Raises:
        ConfigError: the path is not the folder of a sweep.
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
        timeline = contract.timeline_of(recipe.schedule, ranks=size, microbatches=count)
        own = {"ranks": size, "stages": len(timeline.placement), "microbatches": count, **_idle(timeline)}
        # The other columns come from the run's row.
        rows.append({**row, **own, "busy_seconds": row["step_seconds"] * (1 - timeline.bubble_share)})
    return pd.DataFrame(rows, columns=list(_PIPELINES))


def _idle(timeline: Timeline) -> dict[str, float]:
    return dict(zip(_IDLE, (100 * timeline.bubble_share, max(timeline.peak_in_flight)), strict=True))


LOSS, GRAD_NORM = "loss_difference", "grad_norm_difference"
DIFFERENCE_COLUMNS = ("run", "name", "layout.label", "step", "tokens", LOSS, GRAD_NORM)


def differences_frame(steps: DataFrame, reference: str) -> DataFrame:
    """Relative differences of losses and gradient norms from a reference run, step by step.

    |x − reference| / |reference|, for the steps at which both runs have logged a row after the same number of tokens.
    Two layouts of one recipe round sums in another order, and so differ by less than 1e-5 in fp32.

    Args:
        steps: the frame of `metrics_frame`.
        reference: folder name of the run with which the others are compared.

    Returns:
        The columns `DIFFERENCE_COLUMNS`; a difference is a share (0.01 is 1 %), and empty where a value is missing or
        not finite. The reference itself has no rows.

    Raises:
        ConfigError: the frame has no such run.
    """
    own = steps[steps["run"] == reference]
    if own.empty:
        known = ", ".join(dict.fromkeys(steps["run"].astype(str))) or "no run has logged a step"
        raise ConfigError("reference", reference, "is not a run of these steps", f"known: {known}")
    keys = ["step", meter.TOKENS_SEEN]
    names = [name for name in (meter.LOSS, meter.GRAD_NORM) if name in steps]
    others = steps[steps["run"] != reference]
    joined = others.merge(own[[*keys, *names]], on=keys, suffixes=("", " of reference"))
    joined = joined.rename(columns={meter.TOKENS_SEEN: "tokens"})
    for name, column in ((meter.LOSS, LOSS), (meter.GRAD_NORM, GRAD_NORM)):
        if name not in names:
            joined[column] = float("nan")
            continue
        values, of_reference = joined[name].astype(float), joined[f"{name} of reference"].astype(float)
        with np.errstate(divide="ignore", invalid="ignore"):
            difference = (values - of_reference).abs() / of_reference.abs()
        # The difference of equal values is 0, also if both are 0.
        difference = difference.where(values != of_reference, 0.0)
        joined[column] = difference.where(np.isfinite(difference))
    frame: DataFrame = joined[list(DIFFERENCE_COLUMNS)].reset_index(drop=True)
    return frame


def largest_differences(differences: DataFrame) -> DataFrame:
    """One row for each run of `differences_frame`: its largest differences, and how many steps were compared."""
    named = differences.groupby(["run", "name", "layout.label"], sort=False)
    frame: DataFrame = named.agg(steps=("step", "count"), **{name: (name, "max") for name in (LOSS, GRAD_NORM)})
    return frame.reset_index()


def ranking_text(runs: DataFrame, by: str = "tps", *, max_memory_gib: float | None = None) -> str:
    """The output of `titanlab best` for a frame of `sweep_frame`: the answer, its limits, and the ranked recipes.

    Each recipe has an interval of 95 %. Each run counts once, and the noise is estimated from the repeats of all
    recipes together. If the gap between the first two may be noise, the answer names no winner.

    Args:
        by: `tps` (tokens per second of one device), `mfu`, or `memory` (the least).
        max_memory_gib: leave out recipes that need more GiB.
    """
    return "\n".join(ranking_lines(rank(records_of(runs), by=by, max_memory_gib=max_memory_gib)))
