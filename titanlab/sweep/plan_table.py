"""The plan of a submission, as text and as plain values."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from titanlab.errors import ConfigError
from titanlab.launch.contract import launch_of
from titanlab.plan.explanation import MEMORY_ERROR, Estimate, estimate_of
from titanlab.sweep.enqueue import Item, arrays
from titanlab.sweep.listing import aligned, dropped
from titanlab.sweep.plan import Dropped, Planned, Study
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.system.user_path import user_path
from titanlab.terminal.numerals import counted, grouped, trimmed
from titanlab.terminal.paths import sweep_argument
from titanlab.train.tracked_run import has_tracker

if TYPE_CHECKING:
    from titanlab.sweep.plan import Study
    from titanlab.sweep.submit import Decision


HEADINGS = ("run", "layout", "processes", "nodes", "GPU-hours", "est. hours", "est. GB", "checkpoint GB", "action")
FIGURES = ("processes", "nodes", "GPU-hours", "est. hours", "est. GB", "checkpoint GB")
# In the order in which the counts are shown.
_WORDS = {
    "submit": "to submit",
    "queued": "queued already",
    "running": "running already",
    "done": "done already",
    "ended": "ended otherwise",
}


def plan_lines(study: Study, decisions: Sequence[Decision], *, answered: bool = True) -> list[str]:
    """The runs of a study with their actions, their resources together, and the dropped points.

    Args:
        answered: whether the launcher can be asked how many jobs an array takes.
    """
    rows = [_cells(decision) for decision in decisions]
    lines = [f"{study.name}: {counted(len(decisions), 'run')} ({study.origin})"]
    lines += study.notices
    lines += [f"  {line}" for line in aligned(HEADINGS, rows, right=FIGURES)]
    counts = Counter(decision.action for decision in decisions)
    lines.append(", ".join(f"{counts[action]} {words}" for action, words in _WORDS.items() if counts[action]))
    submitted = [decision for decision in decisions if decision.action == "submit"]
    if submitted:
        lines.append(_resources(submitted, answered=answered))
    lines += _without_tracker(study, decisions)
    ended = [decision for decision in decisions if decision.action == "ended"]
    if ended:
        outcomes = sorted({decision.outcome for decision in ended if decision.outcome})
        # An ended run without an outcome gets one at the next reconciliation.
        which = f"--outcome {','.join(outcomes)}" if all(decision.outcome for decision in ended) else "--all-failed"
        sweep = sweep_argument(user_path(study.planned[0].recipe.runs) / study.name)
        lines.append(f"to run those again: titanlab retry {sweep} {which}")
    return lines + dropped([_row(point.stage, point.reason) for point in study.dropped])


def _without_tracker(study: Study, decisions: Sequence[Decision]) -> list[str]:
    """A line for each tracker that the recipes name and that has nothing of runs that have ended."""
    over = [decision for decision in decisions if decision.action in ("done", "ended")]
    if not over:
        return []
    folder = SweepFolder(user_path(over[0].planned.recipe.runs) / study.name)
    lacking = Counter(
        kind
        for decision in over
        for kind, config in decision.planned.recipe.tracker.parts().items()
        if config.for_rebuild(1) is not None and not has_tracker(folder.run(decision.run_name), config.kind)
    )
    return [
        f"{counted(count, 'run')} ended without tracker={kind}; to write its files from metrics.jsonl: "
        f"titanlab sync --tracker {kind} {sweep_argument(folder.path)}"
        for kind, count in lacking.items()
    ]


def plan_values(study: Study, decisions: Sequence[Decision]) -> dict[str, Any]:
    """The same content as plain values."""
    return {
        "sweep": study.name,
        "origin": study.origin,
        **study.definition,
        "runs": [
            {
                "run": decision.run_name,
                "point": dict(decision.planned.point.values),
                "repeat": decision.planned.point.repeat,
                "control": decision.planned.point.is_control,
                "layout": decision.planned.recipe.layout.label,
                "action": decision.action,
                "outcome": decision.outcome,
                "shape": decision.shape.to_mapping(),
                "gpu_hours": decision.shape.gpu_hours,
                "estimate": _mapping(estimate_of(decision.planned.recipe)),
            }
            for decision in decisions
        ],
        "dropped": [
            {"point": dict(drop.point.values), "repeat": drop.point.repeat, "stage": drop.stage, "reason": drop.reason}
            for drop in study.dropped
        ],
        "notices": list(study.notices),
        "counts": dict(Counter(decision.action for decision in decisions)),
    }


def _mapping(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else estimate.to_mapping()


def _cells(decision: Decision) -> tuple[str, ...]:
    shape = decision.shape
    runs_here = decision.planned.recipe.launch.runs_here
    action = decision.outcome if decision.action == "ended" and decision.outcome else decision.action
    return (
        decision.run_name,
        decision.planned.recipe.layout.label,
        str(shape.processes),
        "" if runs_here else str(shape.nodes),
        f"{shape.gpu_hours:.1f}" if shape.gpu_hours else "",
        *_estimated(estimate_of(decision.planned.recipe)),
        f"{action}, control" if decision.planned.point.is_control else action,
    )


def _estimated(estimate: Estimate | None) -> tuple[str, str, str]:
    """Hours, memory of a device and size of a checkpoint; empty if nothing is known of the devices."""
    if estimate is None:
        return "", "", ""
    mark = "" if estimate.fits else " too much"
    hours, checkpoint = (
        trimmed(value) if value < 999.5 else grouped(value)
        for value in (estimate.hours, estimate.checkpoint_bytes / 1e9)
    )
    return hours, f"{estimate.reserved_bytes / 1e9:.1f}{mark}", checkpoint


def _resources(submitted: Sequence[Decision], *, answered: bool) -> str:
    """Jobs, processes, nodes and GPU-hours of the runs that will be submitted."""
    shapes = [decision.shape for decision in submitted]
    parts = [f"{counted(sum(shape.processes for shape in shapes), 'process', 'processes')} in all"]
    if not all(decision.planned.recipe.launch.runs_here for decision in submitted):
        items = [Item(run=run.run_name, shape=run.shape, launch=launch_of(run.planned.recipe)) for run in submitted]
        parts += [
            counted(sum(shape.nodes for shape in shapes), "node"),
            counted(len(list(arrays(items, answered=answered))), "array"),
        ]
    gpus = sum(shape.gpus_per_node * shape.nodes for shape in shapes)
    if gpus:
        hours = [shape.gpu_hours for shape in shapes]
        known = [value for value in hours if value is not None]
        total = f"{sum(known):,.1f}" if len(known) == len(hours) else "no limit to the"
        parts += [counted(gpus, "GPU"), f"{total} GPU-hours asked for"]
    return f"{counted(len(submitted), 'job')}: {', '.join(parts)}; the largest has {max(s.processes for s in shapes):,}"


def _row(stage: str, reason: str) -> dict[str, Any]:
    return {"state": "dropped", "dropped_stage": stage, "cause": reason}


STAGE = "memory"


def fitting(study: Study, *, strictly: bool) -> Study:
    """The study without the runs that do not fit into memory, with a notice on those that may not.

    Args:
        strictly: leave out all whose estimate exceeds a device's memory; else only those whose estimate exceeds it by
            more than the error of estimates.

    Raises:
        ConfigError: none is left.
    """
    kept: list[Planned] = []
    dropped = list(study.dropped)
    doubtful = 0
    for planned in study.planned:
        estimate = estimate_of(planned.recipe)
        if estimate is None or estimate.fits or not (strictly or estimate.cannot_fit):
            kept.append(planned)
            doubtful += estimate is not None and not estimate.fits
        else:
            dropped.append(Dropped(point=planned.point, stage=STAGE, reason=_reason(estimate)))
    if not kept:
        rule = f"none of {len(study.planned)} runs fits into memory; {dropped[-1].reason}"
        cure = "see what fits: titanlab plan; or submit them all the same: --keep"
        raise ConfigError("arguments", study.name, rule, cure)
    notices = []
    percent = f"{100 * MEMORY_ERROR:.0f} %"
    if doubtful:
        notices.append(
            f"{counted(doubtful, 'run')} may not fit into memory: each estimate is too much, but by less than the "
            f"largest error of estimates ({percent}); --prune leaves them out"
        )
    left_out = len(study.planned) - len(kept)
    if left_out and not strictly:
        notices.append(
            f"{counted(left_out, 'run')} left out: their estimates exceed a device's memory by more than {percent}, "
            "the largest error of estimates; --keep keeps all"
        )
    return dataclasses.replace(study, planned=tuple(kept), dropped=tuple(dropped), notices=(*study.notices, *notices))


def _reason(estimate: Estimate) -> str:
    assert estimate.limit_bytes is not None
    return (
        f"would reserve about {estimate.reserved_bytes / 1e9:.0f} GB of a device's {estimate.limit_bytes / 1e9:.1f} GB"
    )
