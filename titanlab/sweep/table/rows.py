"""The table of a sweep: a row for every run and every dropped point, from the files in its folder.

`columns` describes the columns. This module does not ask a scheduler: the caller passes the states of jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlab.errors import TitanlabError
from titanlab.launch.contract import JobState, States
from titanlab.launch.launchers import launcher_named
from titanlab.launch.submission import Submission
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.records.run_status import Status
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of
from titanlab.sweep.table.columns import NAMES, POINT, as_text
from titanlab.sweep.table.estimates import LateEstimates, estimate_columns
from titanlab.sweep.table.listing import ACTIVE
from titanlab.sweep.table.run_columns import figure_columns, machine_columns, provenance_columns, recipe_columns
from titanlab.tracker.jsonl_schema import Jsonl
from titanlab.train.tracked_run import tracker_gap

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
class Table:
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
