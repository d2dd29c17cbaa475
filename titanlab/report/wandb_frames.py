"""The frames of `titanlab.report.frames` from wandb's server; columns that only a run's folder can fill are empty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.records import TRAIN, VALIDATION
from titanlab.report.frames import METRICS, frame_of
from titanlab.sweep import NAMES, POINT, arrow_table, as_text, figure_columns, recipe_columns
from titanlab.system import import_quietly

if TYPE_CHECKING:
    from pandas import DataFrame

_LOSS_OF = {TRAIN: meter.LOSS, VALIDATION: meter.VALIDATION_LOSS}
# Prefix of the metrics of validation rows, because wandb joins all rows of one step into one row.
_VALIDATION = "validation_metrics/"


@dataclass(frozen=True, kw_only=True)
class WandbRun:
    """One run as wandb has recorded it.

    Attributes:
        name: the displayed name; titanlab gives the name of the run's folder.
        group: wandb's group; titanlab gives the name of the sweep.
        config: the recipe, with the flat keys `layout.*` and `point.*`.
        rows: one for each step, in order, with `_step` and `_timestamp` (seconds since 1970).
        summary: medians and last values.
        exit_code: None: the run has not ended.
        cores: CPU cores of the machine; None: not recorded.
    """

    name: str
    group: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    cores: int | None = None


def runs_of_project(project: str, group: str | None = None) -> list[WandbRun]:
    """The runs of a project on wandb's server, which needs a network and a key.

    Args:
        project: `ENTITY/PROJECT`, or a project of the default entity.
        group: only runs of this group: a sweep.
    """
    return [
        WandbRun(
            name=run.name,
            group=run.group or "",
            config=dict(run.config),
            rows=[{**row, "attempt": run.config.get("attempt", 1)} for row in run.scan_history()],
            summary=dict(run.summary),
            exit_code={"finished": 0, "failed": 1, "crashed": 1, "killed": 1}.get(run.state),
            cores=(run.metadata or {}).get("cpu_count_logical"),
        )
        for run in import_quietly("wandb").Api().runs(project, filters={"group": group} if group else {})
    ]


def sweep_frame(runs: Sequence[WandbRun]) -> DataFrame:
    """One row for each run that titanlab logged, with the columns of `titanlab.report.frames.sweep_frame`.

    Raises:
        ConfigError: titanlab logged none of the runs.
    """
    runs, names = _ours(runs)
    sweeps = {run.group for run in runs}
    rows = [_row(run, names) for run in runs]
    return frame_of(arrow_table(rows, sweeps.pop() if len(sweeps) == 1 else "wandb"))


def metrics_frame(runs: Sequence[WandbRun], kind: str = TRAIN) -> DataFrame:
    """One row for each logged step of each run, with the columns of `titanlab.report.frames.metrics_frame`.

    Args:
        kind: `train` or `validation`.

    Raises:
        ConfigError: titanlab logged none of the runs, or the kind is unknown.
    """
    import pandas as pd

    if kind not in _LOSS_OF:
        raise ConfigError("kind", kind, "is not a kind of row", f"try {TRAIN} or {VALIDATION}")
    runs, names = _ours(runs)
    rows: list[dict[str, Any]] = []
    for run in runs:
        row = _row(run, names)
        first = {name: row[name] for name in ("run", "name", "layout.label", *names)}
        for metrics in run.rows:
            if metrics.get(_LOSS_OF[kind]) is None:
                continue
            rows.append({**first, "kind": kind, "step": metrics["_step"], "time": metrics.get("_timestamp")})
            for name, value in metrics.items():
                # Leave out wandb's own values, and values of the other kind of row.
                is_of_kind = name.startswith(_VALIDATION) == (kind == VALIDATION)
                if name == "attempt" or (is_of_kind and not name.startswith(("_", "traffic/"))):
                    rows[-1][name] = value
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["run", "name", "layout.label", *names, *METRICS])


def _ours(runs: Sequence[WandbRun]) -> tuple[list[WandbRun], list[str]]:
    """The runs that titanlab logged, and the names of their `point.` columns."""
    ours = [run for run in runs if _recipe_columns(run.config)]
    if runs and not ours:
        rule, cure = "has runs, and none is one of titanlab", "name a project that titanlab writes to"
        raise ConfigError("runs", ", ".join(run.name for run in runs[:3]), rule, cure)
    return ours, sorted({name for run in ours for name in run.config if name.startswith(POINT)})


def _row(run: WandbRun, points: Iterable[str]) -> dict[str, Any]:
    recipe = _recipe_columns(run.config)
    label, _, digits = run.name.rpartition("-")
    has_ended = run.exit_code is not None
    # wandb copies the last row into the summary. A result's STEP_SECONDS is a median: drop the last row's median.
    is_result = has_ended and meter.MEASURED_STEPS in run.summary
    summary = {name: run.summary[name] for name in run.summary if not (is_result and name == meter.STEP_SECONDS_MEDIAN)}
    is_crowded = recipe["accelerator"] == "cpu" and run.cores is not None and recipe["world"] > run.cores
    known = {
        **recipe,
        "sweep": run.group,
        "run": run.name,
        "name": label or run.name,
        "hash8": digits,
        "state": "ended" if has_ended else "running",
        # The process died if the summary has no outcome.
        "outcome": run.summary.get("outcome", "crash") if has_ended else None,
        "step": run.rows[-1]["_step"] if run.rows else 0,
        "steps": run.config["training"]["steps"],
        "attempt": run.config.get("attempt"),
        "cores": run.cores,
        "oversubscribed": None if run.cores is None else is_crowded,
        **figure_columns(summary, world=recipe["world"]),
        "updated": run.rows[-1].get("_timestamp") if run.rows else None,
    }
    values = {name: as_text(run.config[name]) if name in run.config else None for name in points}
    return {**{name: known.get(name) for name in NAMES}, **values}


def _recipe_columns(config: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's columns; empty: the config is not a recipe of titanlab."""
    try:
        return recipe_columns(config)
    except (LookupError, TypeError, AttributeError):
        return {}
