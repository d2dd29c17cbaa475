"""The table of a sweep: a row for every run and every dropped point, from what lies in its folder.

`columns` says what the columns are. Nothing is asked of a scheduler here: its word is given.
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
from titanlab.sweep.table.run_columns import figure_columns, machine_columns, recipe_columns
from titanlab.training.tracker_gaps import tracker_gap

# Points that were left out on purpose: no rule was broken.
_UNWANTED = ("where", "duplicate")
# In a job's word for itself.
_WAITING = ("pending", "requeued")


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What is known of one run beside its folder.

    Attributes:
        point: its line in points.jsonl; none for a run that the sweep's plan no longer has.
        job: the newest submission that has it.
        index: its place in that submission.
        word: the scheduler's about that place.
    """

    point: Mapping[str, Any] | None = None
    job: Submission | None = None
    index: int = 0
    word: JobState | None = None


@dataclass(frozen=True)
class _Attempt:
    """What an attempt began with: the recipe as it runs it, its environment and its job, where it has them."""

    config: Mapping[str, Any]
    env: Mapping[str, Any] | None
    job: Mapping[str, Any]


@dataclass
class Table:
    """Rows of one sweep, made again and again while it runs: what cannot change is read once.

    Args:
        sweep: its folder.
        code: fingerprint of the code that is here; None: no run is called stale.
    """

    sweep: SweepFolder
    code: str | None = None
    _attempts: dict[tuple[Path, int], _Attempt] = field(default_factory=dict)

    def rows(self, states: States | None = None) -> list[dict[str, Any]]:
        """A row for each run and each dropped point: in the order of the plan, then runs that it no longer has.

        Args:
            states: the scheduler's word by submission and index; None: nothing is known of jobs.
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
                rows.append(self._row(folders.pop(name), _found(point, name, jobs, states)))
            else:
                rows.append(self._missing(point, str(name)))
        rows += [self._row(run, _found(None, name, jobs, states)) for name, run in folders.items()]
        keys = list(dict.fromkeys(key for point in points for key in point.get("point", {})))
        return [{name: row.get(name) for name in (*NAMES, *(POINT + key for key in keys))} for row in rows]

    def _dropped(self, point: Mapping[str, Any]) -> dict[str, Any]:
        why = point["dropped"]
        return {
            "sweep": self.sweep.name,
            "repeat": point.get("repeat"),
            "state": "dropped",
            "outcome": None if why["stage"] in _UNWANTED else OutcomeKind.INFEASIBLE.value,
            "dropped_stage": why["stage"],
            "cause": why["reason"],
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

    def _row(self, run: RunFolder, found: _Found) -> dict[str, Any]:
        try:
            return {**self._facts(run, found), **_names(self.sweep.name, run), **_values(found.point or {})}
        except Exception as error:
            # One folder that somebody has spoilt, however, must not hide the others.
            cause = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, TitanlabError):
                cause = f"its files cannot be understood ({type(error).__name__}: {cause})"
            named = _names(self.sweep.name, run)
            return {**named, "state": "unreadable", "cause": cause, **_values(found.point or {})}

    def _facts(self, run: RunFolder, found: _Found) -> dict[str, Any]:
        status, outcome = run.status() or Status(state="prepared", updated=0.0), run.result()
        state = _state(status, outcome, found)
        end = outcome if state == "ended" else None
        began = self._attempt(run, status.attempt, by_job=found.job is not None)
        facts = {
            **recipe_columns(began.config),
            **figure_columns(end.metrics if end else status.metrics, world=began.config["world"]),
            "state": state,
            "previous_outcome": _previous(run, status.attempt, outcome, ended=end is not None),
            "step": end.step if end else status.step,
            "steps": (end.steps if end else status.steps) or began.config["training"]["steps"],
            "attempt": status.attempt,
            "updated": status.updated or None,
            "folder": str(run.path),
            **machine_columns(began.env, began.job, began.config),
            **_job(found, began),
        }
        if began.env is not None:
            facts["started"] = began.env["time"]
            # An attempt that no process lived to begin ran no code.
            facts["code"] = (began.env.get("code") or {}).get("fingerprint")
            facts["stale"] = None if None in (facts["code"], self.code) else facts["code"] != self.code
        if end is None:
            return {**facts, "seconds_left": status.seconds_left}
        facts["tracker_gap"] = tracker_gap(run) if began.config["tracker"]["kind"] != "jsonl" else None
        word = (end.scheduler or {}).get("state") or facts["scheduler_state"]
        facts |= {"outcome": end.kind.value, "cause": end.cause, "rank": end.rank, "ended": end.ended}
        return {**facts, "exit_code": end.exit_code, "scheduler_state": word}

    def _attempt(self, run: RunFolder, attempt: int, *, by_job: bool) -> _Attempt:
        key = (run.path, attempt)
        if key not in self._attempts:
            # Of another version, what the other files say may mean something else.
            run.identity()
            folder = run.attempt_folder(attempt)
            config = run.config(attempt if (folder / "config.yaml").is_file() else None)
            env = run.env(attempt) if attempt else None
            made = _Attempt(config, env, (run.job(attempt) if attempt else None) or {})
            if attempt and (env is None or (by_job and not made.job)):
                return made  # What it lacks is about to be written.
            self._attempts[key] = made
        return self._attempts[key]


def _state(status: Status, outcome: Outcome | None, found: _Found) -> str:
    """Where a run stands: its own word, but for what only the scheduler knows."""
    word = found.word.state if found.word else None
    if word in _WAITING:
        return "queued"
    if outcome is not None and not (word == "running" and found.job and outcome.ended < found.job.created):
        return "ended"
    if word == "running" and status.state in ("prepared", "ended"):
        return "starting"
    # A job whose scheduler does not answer has at least been handed over.
    if status.state == "prepared" and found.job is not None:
        return "queued"
    return status.state


def _previous(run: RunFolder, attempt: int, outcome: Outcome | None, *, ended: bool) -> str | None:
    """How the attempt before ended; for one that waits to go on, the latest."""
    last = outcome if outcome is not None and not ended else run.result(attempt - 1) if attempt > 1 else None
    return last.kind.value if last else None


def _found(
    point: Mapping[str, Any] | None, run: str, jobs: Mapping[str, tuple[Submission, int]], states: States | None
) -> _Found:
    if run not in jobs:
        return _Found(point=point)
    job, index = jobs[run]
    return _Found(point=point, job=job, index=index, word=(states or {}).get((job.token, index)))


def _job(found: _Found, began: _Attempt) -> dict[str, Any]:
    launcher = began.env["launcher"] if began.env else None
    if found.job is None:
        return {"launcher": launcher, "scheduler_state": None}
    ours = began.job if (began.job.get("token"), began.job.get("index")) == (found.job.token, found.index) else {}
    own = launcher_named(found.job.launcher)
    return {
        "launcher": found.job.launcher,
        "job_id": ours.get("job_id") or own.job_number(found.job, found.index),
        "queue_reason": found.word.reason if found.word and found.word.state in (*_WAITING, "unknown") else None,
        "scheduler_state": found.word.raw if found.word and own.has_scheduler else None,
    }


def _names(sweep: str, run: RunFolder) -> dict[str, Any]:
    return {"sweep": sweep, "run": run.path.name, "name": run.name, "hash8": run.hash8}


def _values(point: Mapping[str, Any]) -> dict[str, str]:
    return {POINT + key: as_text(value) for key, value in point.get("point", {}).items()}
