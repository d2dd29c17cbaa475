"""What a signal to a job means: preemption, the end of its time, or somebody who cancels it.

Slurm sends the same signals for all three, and to all processes at once. One process of the job finds out, and writes
it down for the others (`attempts/N/stop.json`): the first word stands, so that all ranks are told the same.

Of Slurm 22.05, by experiment: during the grace time of a preemption `PreemptTime` is set; a job that is put back into
the queue has one more in `Restarts`; one that is over its limit has the reason `TimeLimit`, one whose node failed
`NodeDown`; one that scancel ends is `COMPLETING` without any of these. Warnings before a time limit come up to a minute
early.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from titanlab.records.outcome import OutcomeKind
from titanlab.sweep.job.place import Place
from titanlab.system.command import ask, output_of

FILE = "stop.json"
EARLY_SECONDS = 75.0
_TIMEOUT_SECONDS = 20.0
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Why a job is to end.

    Attributes:
        kind: `cancelled`, `preempted` or `walltime`.
        cause: in a line.
    """

    kind: OutcomeKind
    cause: str


def meaning(number: int, place: Place, *, signal_seconds: float, cancelled_by: str | None) -> Wish:
    """What a signal to a job means.

    Args:
        signal_seconds: how long before its time limit the job asked to be warned.
        cancelled_by: who has asked titanlab itself to cancel the run.
    """
    name = signal.Signals(number).name
    if cancelled_by is not None:
        return Wish(kind=OutcomeKind.CANCELLED, cause=f"{cancelled_by}; the run can be resumed")
    if number == signal.SIGINT:
        return Wish(kind=OutcomeKind.CANCELLED, cause="interrupted by SIGINT; the run can be resumed")
    if number == signal.SIGXCPU:
        return Wish(kind=OutcomeKind.WALLTIME, cause="its limit of CPU time is used up (SIGXCPU)")
    if place.launcher != "slurm":
        return Wish(kind=OutcomeKind.PREEMPTED, cause=f"asked to end by {name}; the run can be resumed")
    # With its place in the array: the last one's bare number is that of the whole array.
    facts = _job_facts(place.job_id)
    return _of_slurm(number, place, facts, signal_seconds=signal_seconds, now=time.time())


def _of_slurm(number: int, place: Place, facts: Mapping[str, str], *, signal_seconds: float, now: float) -> Wish:
    name, job = signal.Signals(number).name, f"job {place.job_id}"
    if facts.get("PreemptTime", "None") not in ("None", "Unknown") or facts.get("JobState") == "PREEMPTED":
        return Wish(kind=OutcomeKind.PREEMPTED, cause=f"{job} is preempted ({name})")
    if int(facts.get("Restarts") or 0) > place.restart:
        return Wish(kind=OutcomeKind.PREEMPTED, cause=f"{job} is put back into the queue ({name})")
    if facts.get("Reason") == "NodeDown" or facts.get("JobState") in ("NODE_FAIL", "BOOT_FAIL"):
        # Whoever lives can save; that a node is lost, the scheduler says afterwards.
        return Wish(kind=OutcomeKind.PREEMPTED, cause=f"a node of {job} failed ({name})")
    if facts.get("Reason") == "TimeLimit" or facts.get("JobState") == "TIMEOUT":
        return Wish(kind=OutcomeKind.WALLTIME, cause=f"the time limit of {job} is reached ({name})")
    if facts.get("JobState") in ("COMPLETING", "CANCELLED"):
        return Wish(kind=OutcomeKind.CANCELLED, cause=f"{job} was cancelled ({name})")
    end = _seconds(facts.get("EndTime", ""))
    if end is not None and end - now <= signal_seconds + EARLY_SECONDS:
        left = max(0, round(end - now))
        return Wish(kind=OutcomeKind.WALLTIME, cause=f"{left} s are left of the time limit of {job} ({name})")
    if number == signal.SIGTERM and facts:
        return Wish(kind=OutcomeKind.CANCELLED, cause=f"{job} was sent {name}, and Slurm knows no reason")
    return Wish(kind=OutcomeKind.PREEMPTED, cause=f"{job} was warned by {name}")


def write_wish(attempt: Path, wish: Wish) -> Wish:
    """Write a wish into an attempt's folder, unless there is one. Returns the one that stands."""
    text = json.dumps({"schema": 1, "kind": wish.kind.value, "cause": wish.cause, "time": time.time()})
    # A reader who sees half of it sees nothing, and looks again.
    with contextlib.suppress(FileExistsError), (attempt / FILE).open("x", encoding="utf-8") as file:
        file.write(text)
    return read_wish(attempt) or wish


def read_wish(attempt: Path) -> Wish | None:
    """The wish in an attempt's folder."""
    try:
        told = json.loads((attempt / FILE).read_text(encoding="utf-8"))
        return Wish(kind=OutcomeKind(told["kind"]), cause=str(told["cause"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def put_back(place: Place) -> str | None:
    """Put this process's job back into Slurm's queue. Returns what speaks against it."""
    if int(_job_facts(place.job_id).get("Restarts") or 0) > place.restart:
        return "Slurm has done that already"
    answer = ask("scontrol", "requeue", place.job_id)
    if answer is None:
        return "scontrol does not answer"
    return None if answer.code == 0 else answer.complaint


def _job_facts(job: str) -> Mapping[str, str]:
    """What `scontrol show job` says, as far as values have no spaces; empty where it does not answer."""
    environ = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    for _ in range(_TRIES):
        told = output_of("scontrol", "show", "job", "--oneliner", job, seconds=_TIMEOUT_SECONDS, environ=environ) or ""
        if "JobState=" in told:
            return dict(word.split("=", 1) for word in told.split() if "=" in word)
        time.sleep(0.2)
    return {}


def _seconds(text: str) -> float | None:
    """Slurm's local time in seconds since the epoch."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
