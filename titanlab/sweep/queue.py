"""Where the jobs of submissions stand: one question to the queue and one to the accounting, for all of them.

Jobs are known by their name, which has the submission's token: after a reset Slurm's numbers begin anew, and another
job may have ours. On this host it is the supervisor's notes and the locks of live processes that tell.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titanlab.claim import is_claimed
from titanlab.command import output_of
from titanlab.ranks import hosts
from titanlab.run_folder import RunFolder
from titanlab.sweep.local_submit import LOCK
from titanlab.sweep.submission import Submission, local_job

# As long, a job that nobody knows may be on its way into the queue.
_FRESH_SECONDS = 60.0
_WAITING = frozenset("PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT".split())
_ALIVE = frozenset("RUNNING COMPLETING SUSPENDED STOPPED SIGNALING STAGE_OUT RESIZING".split())
_SQUEUE = "%j|%F|%K|%A|%T|%r|%M|%N"
_SACCT = "JobName,JobID,State,ExitCode,ElapsedRaw,NodeList,Reason"


@dataclass(frozen=True, kw_only=True)
class JobState:
    """Where one job stands.

    Attributes:
        state: `pending`, `running`, `requeued`: it waits to go on, `ended`, `gone`: nobody has ever heard of it, or no
            longer, or `unknown`: nobody answers.
        raw: the scheduler's own word, without what follows it.
        exit_code: of the job, -N where signal N ended it or its step; None while it lives, or where it is not told.
        reason: why it waits, or failed, in the scheduler's word.
        elapsed_seconds: of its latest start.
        nodes: names of its nodes.
        job_id: its number in the queue; with its place in the array.
    """

    state: str
    raw: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    elapsed_seconds: float | None = None
    nodes: tuple[str, ...] = ()
    job_id: str | None = None


def job_states(submitted: Sequence[Submission], sweep: Path) -> Mapping[tuple[str, int], JobState]:
    """The state of every job, by token and index.

    Args:
        sweep: the folder that the submissions are in.
    """
    found: dict[tuple[str, int], JobState] = {}
    remote = [each for each in submitted if each.launcher == "slurm"]
    told = _slurm(remote) if remote else {}
    for each in submitted:
        for index, run in enumerate(each.runs):
            key = (each.token, index)
            found[key] = told[key] if each.launcher == "slurm" else _local(sweep, each, index, run)
    return found


def _local(sweep: Path, submission: Submission, index: int, run: str) -> JobState:
    job, folder = local_job(sweep, submission.token, index), RunFolder(sweep / run)
    working = folder.is_claimed()
    if job is None:
        return JobState(state="running" if working else "pending", job_id=submission.token)
    elapsed = None if job.started is None else (job.ended or time.time()) - job.started
    if working or job.is_alive(folder):
        state = "running"
    elif job.state == "starting":
        # Whose supervisor died before there was a process is started by the next one.
        state = "running" if is_claimed(sweep, file=LOCK) else "pending"
    else:
        state = "ended"
    return JobState(
        state=state,
        raw=job.state,
        elapsed_seconds=elapsed,
        nodes=(job.host,),
        job_id=submission.job_id or submission.token,
    )


def _slurm(submitted: Sequence[Submission]) -> dict[tuple[str, int], JobState]:
    names = ",".join(each.job_name for each in submitted)
    # Days of grace for clocks that differ.
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(min(each.created for each in submitted) - 86_400))
    # In this order: a job that the accounting takes for alive and the queue, asked later, does not know is lost.
    listed = output_of(
        "sacct", "--noheader", "--parsable2", f"--name={names}", f"--starttime={since}", f"--format={_SACCT}"
    )
    queued = output_of("squeue", "--noheader", "--array", "--states=all", f"--name={names}", f"--format={_SQUEUE}")
    recorded = _recorded(listed or "")
    live = _queued(queued or "")
    found = {}
    for each in submitted:
        for index in range(len(each.runs)):
            key = (each.job_name, index)
            state = _together(
                live.get(key), recorded.get(key), answered=queued is not None, accounted=listed is not None
            )
            if state.state == "gone" and (each.state == "intent" or time.time() - each.created < _FRESH_SECONDS):
                state = JobState(state="unknown")
            found[each.token, index] = state
    return found


def _together(live: JobState | None, recorded: JobState | None, *, answered: bool, accounted: bool) -> JobState:
    """What queue and accounting say of one job, which may contradict each other for some seconds."""
    if live is not None and live.state == "ended" and accounted and (recorded is None or recorded.state != "ended"):
        # How it ended is known when the accounting has it, too.
        return replace(live, state="running")
    if live is not None and (live.state != "ended" or recorded is None):
        return live
    if recorded is not None and recorded.state == "ended":
        return recorded
    if not answered:
        return JobState(state="unknown")
    return JobState(state="gone", raw=recorded.raw if recorded else None, job_id=recorded.job_id if recorded else None)


def _queued(text: str) -> dict[tuple[str, int], JobState]:
    """The lines of squeue: name, array, place in it, number, state, reason, time, nodes."""
    found = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 8:
            continue
        name, array, place, number, raw, reason, elapsed, nodes = fields
        index = int(place) if place.isdecimal() else 0
        state = _state(raw)
        if state == "pending" and reason == "BeginTime":
            # Nobody asks for a time to begin at: Slurm does, for what it has put back.
            state = "requeued"
        found[name, index] = JobState(
            state=state,
            raw=raw,
            reason=None if reason in ("None", "") else reason,
            elapsed_seconds=_seconds(elapsed),
            nodes=tuple(hosts(nodes)),
            job_id=f"{array}_{place}" if place.isdecimal() else number,
        )
    return found


def _recorded(text: str) -> dict[tuple[str, int], JobState]:
    """The lines of sacct: name, number, state, exit code, time, nodes, reason; of each job, and then of its steps."""
    found: dict[tuple[str, int], JobState] = {}
    keys: dict[str, tuple[str, int]] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 7:
            continue
        name, number, words, code, elapsed, nodes, reason = fields
        job, _, step = number.partition(".")
        _, bar, place = job.partition("_")
        if bar and not place.isdecimal():
            continue  # Those of an array that still wait, all in one.
        raw = words.split()[0] if words else ""
        state = _state(raw)
        exit_code = _exit_code(code) if state == "ended" else None
        if step:
            # A numbered one is srun's; the batch file is a step, too. The job's own code is srun's, which tells of
            # signal 9 as of exit code 9, and sacct's DerivedExitCode lacks a step that ends a moment after its job.
            killed = step.isdecimal() and exit_code is not None and exit_code < 0
            if killed and job in keys and found[keys[job]].exit_code:
                found[keys[job]] = replace(found[keys[job]], exit_code=exit_code)
            continue
        keys[job] = (name, int(place) if bar else 0)
        found[keys[job]] = JobState(
            state=state,
            raw=raw,
            exit_code=exit_code,
            reason=None if reason in ("None", "") else reason,
            elapsed_seconds=float(elapsed) if elapsed.isdecimal() else None,
            nodes=tuple(hosts(nodes)) if not nodes.startswith("None") else (),
            job_id=job,
        )
    return found


def _state(raw: str) -> str:
    if raw in _WAITING:
        return "requeued" if raw.startswith("REQUEUE") else "pending"
    return "running" if raw in _ALIVE else "ended"


def _exit_code(text: str) -> int | None:
    """Slurm's `CODE:SIGNAL`."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        return None
    code, signal = int(match[1]), int(match[2])
    if signal > 64:
        return None  # No signal: Slurm's own sign for want of memory is 0:125.
    return -signal if signal and not code else code


def _seconds(text: str) -> float | None:
    """Slurm's `[DAYS-][HOURS:]MINUTES:SECONDS`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
