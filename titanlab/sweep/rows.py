"""The table of a sweep: a row for every run and every dropped point, from the files in its folder.

`columns` describes the columns. This module does not ask a scheduler: the caller passes the states of jobs, except
`look_at`, which reads the folders at every call and asks the scheduler every few seconds. The planner's estimates are
made when a sweep is submitted, and kept in points.jsonl: to read a recipe back takes forty times as long.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import titanlab
from titanlab.errors import ConfigError, TitanlabError
from titanlab.launch.contract import JobState, States
from titanlab.launch.launchers import launcher_named
from titanlab.launch.submission import Submission
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.provenance import code_fingerprint
from titanlab.records.run_folder import RunFolder, Status
from titanlab.sweep.columns import (
    COLUMNS,
    NAMES,
    NUMBER,
    POINT,
    SCHEMA,
    TEXT,
    TRUTH,
    WHOLE,
    as_text,
    figure_columns,
    fitting,
    machine_columns,
    point_keys,
    provenance_columns,
    recipe_columns,
)
from titanlab.sweep.listing import ACTIVE
from titanlab.sweep.reconcile import close_dead_runs, reconcile
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of
from titanlab.techniques.tracker.trackers_schema import Jsonl
from titanlab.train.tracked_run import tracker_gap

if TYPE_CHECKING:
    from titanlab.recipe.recipe import Recipe


# Points that were dropped on purpose: no rule was broken.
_UNWANTED = ("where", "duplicate")
_WAITING = ("pending", "requeued")


@dataclass(frozen=True, kw_only=True)
class _Context:
    """What is known of a run outside its folder.

    Attributes:
        point: its line in points.jsonl; None if the sweep's plan does not contain the run any more.
        job: its newest submission.
        index: its index in that submission.
        job_state: from the scheduler.
    """

    point: Mapping[str, Any] | None = None
    job: Submission | None = None
    index: int = 0
    job_state: JobState | None = None


@dataclass(frozen=True)
class _Attempt:
    """The start of an attempt: its recipe, and its environment and job if they are recorded."""

    config: Mapping[str, Any]
    env: Mapping[str, Any] | None
    job: Mapping[str, Any]


@dataclass
class SweepTable:
    """The rows of one sweep, to be computed repeatedly while it runs: files that cannot change are read once.

    Args:
        sweep: its folder.
        code: fingerprint of the present code; None: no run is marked as stale.
        late: estimates runs for which no estimate was kept; None: these have none.
    """

    sweep: SweepFolder
    code: str | None = None
    late: LateEstimates | None = None
    _attempts: dict[tuple[Path, int], _Attempt] = field(default_factory=dict)

    def rows(self, states: States | None = None) -> list[dict[str, Any]]:
        """A row for each run and each dropped point: in the order of the plan, then runs that are not in the plan.

        Args:
            states: from the scheduler, by token and index; None: nothing is known of jobs.
        """
        points = self.sweep.points()
        folders = {run.path.name: run for run in self.sweep.runs()}
        jobs = jobs_of(self.sweep, self.sweep.submissions())
        rows = []
        for point in points:
            name = point.get("run")
            if point.get("dropped"):
                rows.append(self._dropped(point))
            elif name in folders:
                rows.append(self._row(folders.pop(name), _context(point, name, jobs, states)))
            else:
                rows.append(self._missing(point, str(name)))
        rows += [self._row(run, _context(None, name, jobs, states)) for name, run in folders.items()]
        keys = list(dict.fromkeys(key for point in points for key in point.get("point", {})))
        return [{name: row.get(name) for name in (*NAMES, *(POINT + key for key in keys))} for row in rows]

    def _dropped(self, point: Mapping[str, Any]) -> dict[str, Any]:
        drop = point["dropped"]
        return {
            "sweep": self.sweep.name,
            "repeat": point.get("repeat"),
            "state": "dropped",
            "outcome": None if drop["stage"] in _UNWANTED else OutcomeKind.INFEASIBLE.value,
            "dropped_stage": drop["stage"],
            "cause": drop["reason"],
            **_values(point),
        }

    def _missing(self, point: Mapping[str, Any], run: str) -> dict[str, Any]:
        return {
            **_names(self.sweep.name, self.sweep.run(run)),
            "repeat": point.get("repeat"),
            "state": "missing",
            "cause": "its folder is gone; submit the sweep again",
            **_values(point),
        }

    def _row(self, run: RunFolder, context: _Context) -> dict[str, Any]:
        try:
            return {**self._facts(run, context), **_names(self.sweep.name, run), **_values(context.point or {})}
        except Exception as error:
            # Catch everything: one damaged folder must not hide the others.
            cause = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, TitanlabError):
                cause = f"its files cannot be understood ({type(error).__name__}: {cause})"
            names = _names(self.sweep.name, run)
            return {**names, "state": "unreadable", "cause": cause, **_values(context.point or {})}

    def _facts(self, run: RunFolder, context: _Context) -> dict[str, Any]:
        status, outcome = run.status() or Status(state="prepared", updated=0.0), run.result()
        state = _state(status, outcome, context)
        end = outcome if state == "ended" else None
        began = self._attempt(run, status.attempt, by_job=context.job is not None)
        facts = {
            **recipe_columns(began.config),
            **figure_columns(end.metrics if end else status.metrics, world=began.config["world"]),
            "state": state,
            "previous_outcome": _previous(run, status.attempt, outcome, ended=end is not None),
            "step": end.step if end else status.step,
            "steps": (end.steps if end else status.steps) or began.config["training"]["steps"],
            "attempt": status.attempt,
            # The first attempt is none: most runs need no look into their folders.
            "restarts": run.restarts() if status.attempt > 1 else 0,
            "updated": status.updated or None,
            "folder": str(run.path),
            **dict(zip(("parent_run", "parent_step"), run.parent() or (None, None), strict=True)),
            **machine_columns(began.env, began.job, began.config),
            **provenance_columns(began.env, began.job),
            **_job(context, began),
        }
        kept = (context.point or {}).get("estimate") or (self.late.of(began.config) if self.late else None)
        facts |= estimate_columns(kept, facts["layout.label"])
        if began.env is not None:
            facts["started"] = began.env.get("time")
            # If no process lived to begin the attempt, no code is recorded.
            fingerprint = began.env.get("code", {}).get("fingerprint")
            facts["code"] = fingerprint if isinstance(fingerprint, str) else None
            facts["stale"] = None if None in (facts["code"], self.code) else facts["code"] != self.code
        if end is None:
            stopped = run.stopped(status.attempt) if state in ACTIVE else None
            return {**facts, "cause": stopped, "seconds_left": None if stopped else status.seconds_left}
        facts["tracker_gap"] = tracker_gap(run) if began.config["tracker"]["kind"] != Jsonl.kind else None
        word = (end.scheduler or {}).get("state") or facts["scheduler_state"]
        facts |= {"outcome": end.kind.value, "cause": end.cause, "rank": end.rank, "ended": end.ended}
        return {**facts, "exit_code": end.exit_code, "scheduler_state": word}

    def _attempt(self, run: RunFolder, attempt: int, *, by_job: bool) -> _Attempt:
        key = (run.path, attempt)
        if key not in self._attempts:
            # Raises an error if another version wrote the run: its other files may have another meaning.
            run.identity()
            folder = run.attempt_folder(attempt)
            config = run.config(attempt if (folder / "config.yaml").is_file() else None)
            env = run.env(attempt) if attempt else None
            attempted = _Attempt(config, env, (run.job(attempt) if attempt else None) or {})
            if attempt and (env is None or (by_job and not attempted.job)):
                return attempted  # Do not keep it: the missing files are about to be written.
            self._attempts[key] = attempted
        return self._attempts[key]


def _state(status: Status, outcome: Outcome | None, context: _Context) -> str:
    """The state of a run: from its own files, except for what only the scheduler knows."""
    word, job = context.job_state.state if context.job_state else None, context.job
    # A job puts itself back into the queue some seconds after the result, and its next start needs some to begin.
    may_return = outcome is not None and outcome.kind.automatic and job is not None and job.launch.get("requeue", False)
    if word in _WAITING or (word == "unknown" and may_return):
        return "queued"
    if outcome is not None and not (word == "running" and job and (may_return or outcome.ended < job.created)):
        return "ended"
    if word == "running" and status.state in ("prepared", "ended"):
        return "starting"
    # Also if the scheduler does not answer: the job has been submitted.
    if status.state == "prepared" and context.job is not None:
        return "queued"
    return status.state


def _previous(run: RunFolder, attempt: int, outcome: Outcome | None, *, ended: bool) -> str | None:
    """The outcome of the attempt before; for a run that waits to resume, the latest outcome."""
    last = outcome if outcome is not None and not ended else run.result(attempt - 1) if attempt > 1 else None
    return last.kind.value if last else None


def _context(
    point: Mapping[str, Any] | None, run: str, jobs: Mapping[str, tuple[Submission, int]], states: States | None
) -> _Context:
    if run not in jobs:
        return _Context(point=point)
    job, index = jobs[run]
    return _Context(point=point, job=job, index=index, job_state=(states or {}).get((job.token, index)))


def _job(context: _Context, began: _Attempt) -> dict[str, Any]:
    job, index, state = context.job, context.index, context.job_state
    started_by = began.env.get("launcher") if began.env else None
    if job is None:
        return {"launcher": started_by, "scheduler_state": None}
    own = began.job if (began.job.get("token"), began.job.get("index")) == (job.token, index) else {}
    launcher = launcher_named(job.launcher)
    return {
        "launcher": job.launcher,
        "job_id": own.get("job_id") or launcher.job_number(job, index),
        "queue_reason": state.reason if state and state.state in (*_WAITING, "unknown") else None,
        "scheduler_state": state.raw if state and launcher.has_scheduler else None,
    }


def _names(sweep: str, run: RunFolder) -> dict[str, Any]:
    return {"sweep": sweep, "run": run.path.name, "name": run.name, "hash8": run.hash8}


def _values(point: Mapping[str, Any]) -> dict[str, Any]:
    """The point's columns; empty for a run that is in no plan."""
    if not point:
        return {}
    values = {POINT + key: as_text(value) for key, value in point.get("point", {}).items()}
    return {"control": point.get("control") is True, **values}


PREFIX = "estimate."
FIGURES = ("step_seconds", "tokens_per_second", "memory_gib")
# To read so many recipes back takes about three seconds.
_MOST_RECIPES = 80
_TOO_MANY = f"not kept when it was submitted; of older sweeps only {_MOST_RECIPES} recipes are estimated"
_OTHER_LAYOUT = "is that of {layout}, the layout in which it was submitted"
# Parts of a recipe that change no estimate.
_IRRELEVANT = ("name", "sweep", "repeat", "seed", "runs", "tracker", "launch", "checkpoint", "profiler", "init_from")


def estimate_values(recipe: Recipe) -> dict[str, Any]:
    """The estimate of a resolved recipe as plain values: `layout`, the figures, and why there are none."""
    from titanlab.plan.explanation import estimate_or_reason

    values: dict[str, Any] = {"layout": recipe.layout.label, **dict.fromkeys(FIGURES), "note": None}
    try:
        answer = estimate_or_reason(recipe)
    except TitanlabError as error:
        answer = str(error)
    if isinstance(answer, str):
        return {**values, "note": answer}
    seconds = answer.hours * 3600 / recipe.training.steps
    return {
        **values,
        "step_seconds": seconds,
        "tokens_per_second": recipe.tokens_per_step / seconds / recipe.layout.world if seconds > 0 else None,
        "memory_gib": answer.reserved_bytes / 2**30,
    }


def estimate_columns(kept: Mapping[str, Any] | None, layout: str | None) -> dict[str, Any]:
    """The columns of a row.

    Args:
        kept: the estimate that was made for the run; None: none was.
        layout: of the latest attempt, which may have another layout than the estimated one.
    """
    if not isinstance(kept, Mapping):
        return {}
    if layout is not None and kept.get("layout") not in (None, layout):
        return {f"{PREFIX}note": _OTHER_LAYOUT.format(layout=kept["layout"])}
    return {f"{PREFIX}{name}": kept.get(name) for name in (*FIGURES, "note")}


class LateEstimates:
    """Estimates of runs for which none was kept: of sweeps of an earlier version, and of single runs."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The estimate of a frozen recipe; equal recipes are estimated once."""
        key = json.dumps({name: value for name, value in config.items() if name not in _IRRELEVANT}, sort_keys=True)
        if key not in self._known:
            if len(self._known) >= _MOST_RECIPES:
                return {"note": _TOO_MANY}
            self._known[key] = _estimated(config)
        return self._known[key]


def _estimated(config: Mapping[str, Any]) -> dict[str, Any]:
    from titanlab.recipe.recipe import from_mapping

    try:
        return estimate_values(from_mapping(config))
    except (TitanlabError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return {"note": f"its recipe cannot be read ({reason})"}


SCHEMA_KEY, SWEEP_KEY = "titanlab.schema", "titanlab.sweep"


def parquet_schema(points: Sequence[str], sweep: str) -> Any:
    """The schema of the file: all columns, and a text column for each key of the points.

    Args:
        points: names of the points' columns.
    """
    import pyarrow as pa

    types = {TEXT: pa.string(), WHOLE: pa.int64(), NUMBER: pa.float64(), TRUTH: pa.bool_()}
    fields = [pa.field(column.name, types[column.type]) for column in COLUMNS]
    fields += [pa.field(name, pa.string()) for name in points]
    return pa.schema(fields, metadata={SCHEMA_KEY: str(SCHEMA), SWEEP_KEY: sweep})


def arrow_table(rows: Sequence[Mapping[str, Any]], sweep: str) -> Any:
    """The rows as a table of pyarrow; a value of another kind than its column is left out."""
    import pyarrow as pa

    sound = [{name: fitting(name, value) for name, value in row.items()} for row in rows]
    return pa.Table.from_pylist(sound, schema=parquet_schema(point_keys(rows), sweep))


def write_table(rows: Sequence[Mapping[str, Any]], sweep: str, into: Path) -> list[Path]:
    """Write `<sweep>.parquet` and `<sweep>.csv`, each atomically. Returns their paths.

    Raises:
        ConfigError: the folder cannot be written.
    """
    from pyarrow import csv, parquet

    table = arrow_table(rows, sweep)
    # Spreadsheets compute a text that begins with these, and a cause may be text of anybody.
    plain = arrow_table([{name: _inert(value) for name, value in row.items()} for row in rows], sweep)
    try:
        into.mkdir(parents=True, exist_ok=True)
        return [
            _whole(into / f"{sweep}.parquet", lambda path: parquet.write_table(table, path)),
            _whole(into / f"{sweep}.csv", lambda path: csv.write_csv(plain, path)),
        ]
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error})"
        raise ConfigError("--into", into, rule, "name a folder of yours") from error


def _inert(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _whole(path: Path, write: Callable[[Path], None]) -> Path:
    """Write a temporary file in the same folder, then rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


# A scheduler serves many users, so do not ask it at every call; without a scheduler only local files are read.
_ASK_SECONDS = 10.0


def look_at(
    sweep: SweepFolder,
    report: Callable[[str], None] = lambda line: None,
    *,
    estimates: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], list[dict[str, Any]]]:
    """A function that returns the sweep's current rows at every call.

    Args:
        estimates: whether runs for which no estimate was kept are estimated now, which takes some seconds.

    Runs whose jobs have ended without a result get one; if that cannot be written, `report` is called, once for each
    message.
    """
    reported: set[str] = set()

    def once(line: str) -> None:
        if line not in reported:
            reported.add(line)
            report(line)

    code = code_fingerprint(Path(titanlab.__file__).parent)
    table = SweepTable(sweep, code=code, late=LateEstimates() if estimates else None)
    states: States = {}
    due = -float("inf")

    def look() -> list[dict[str, Any]]:
        nonlocal states, due
        submitted = sweep.submissions()
        if not submitted:
            close_dead_runs(sweep)
        elif clock() >= due:
            states = reconcile(sweep, once)
            if any(launcher_named(submission.launcher).has_scheduler for submission in submitted):
                due = clock() + _ASK_SECONDS
        return table.rows(states)

    return look
