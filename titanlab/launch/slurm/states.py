"""The states of jobs and why they ended, according to squeue, sacct and the logs of Slurm.

Slurm is asked by job numbers, but only lines whose job name ends with the submission's token are used: after a reset
Slurm counts from the beginning, and another job may have the same number.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from titanlab.launch.contract import UNANSWERED, JobEnd, JobKey, JobState, MemoryWord
from titanlab.launch.slurm.command import (
    ACCOUNTING_SECONDS,
    Reply,
    accounted_since,
    ask_slurm,
    elements_of,
    hosts,
    seconds_of,
)
from titanlab.launch.submission import Submission, token_of
from titanlab.records import OutcomeKind, RunFolder, text_at_end

# The signal that Slurm reports if a node cannot open a job's output files; no process received it.
_NO_LOGS = 53
# The reason that Slurm gives if no node can ever fulfil the request.
REFUSED = "BadConstraints"
_WORDS: Mapping[str, tuple[OutcomeKind, str]] = {
    "TIMEOUT": (OutcomeKind.WALLTIME, "the job's time limit was reached before it could save"),
    "DEADLINE": (OutcomeKind.WALLTIME, "the job's deadline was reached before it could save"),
    "NODE_FAIL": (OutcomeKind.NODE_FAIL, "a node of the job failed"),
    "BOOT_FAIL": (OutcomeKind.NODE_FAIL, "a node of the job could not be started"),
    "OUT_OF_MEMORY": (OutcomeKind.OOM, "the job had more memory than it was given"),
    "CANCELLED": (OutcomeKind.CANCELLED, "the job was cancelled"),
    "PREEMPTED": (OutcomeKind.PREEMPTED, "the job was preempted before it could save"),
    "REVOKED": (OutcomeKind.CANCELLED, "the job was revoked"),
}


def end_of(state: JobState) -> JobEnd | None:
    """Why a job ended, if the name of its state alone explains it."""
    if state.exit_code == -_NO_LOGS:
        cause = "Slurm could not write the job's logs on its node (signal 53): do the nodes share the folder of runs?"
        return JobEnd(kind=OutcomeKind.CRASH, cause=cause)
    known = _WORDS.get(state.raw or "")
    return JobEnd(kind=known[0], cause=known[1]) if known is not None else None


def end_in_queue(state: JobState) -> JobEnd | None:
    """Why a job ended that never started, if Slurm's state and reason explain it."""
    if state.raw in ("CANCELLED", "REVOKED"):
        return JobEnd(kind=OutcomeKind.CANCELLED, cause="the job was cancelled before it started")
    if state.raw == "DEADLINE":
        return JobEnd(kind=OutcomeKind.WALLTIME, cause="the job's deadline passed before it started")
    if state.raw == "FAILED":
        kind = OutcomeKind.INFEASIBLE if state.reason == REFUSED else OutcomeKind.CRASH
        cause = f"Slurm failed the job before it started: {state.reason or 'it gives no reason'}"
        return JobEnd(kind=kind, cause=cause)
    return None


# From slurmstepd, which watches a step: by its own count of memory (OverMemoryKill), or by that of the control group.
# "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed."
# "slurmstepd-n1: error: StepId=12.0 exceeded memory limit (1176580096 > 1073741824), being killed"
_SENTENCE = re.compile(
    r"slurmstepd[^:]*: error: (?P<said>.*(?:oom[-_ ]?kill|exceeded (?:\w+ )?memory limit).*)$", re.IGNORECASE
)
# From srun, for one task or several: "srun: error: n1: task 1: Out Of Memory", "srun: error: n1: tasks 0-1: Killed".
_TASK = re.compile(r"srun: error: \S+ task (?P<rank>\d+): (?P<how>Out Of Memory|Killed)\s*$")
_TASKS = re.compile(r"srun: error: \S+ tasks \S+: (?:Out Of Memory|Killed)\s*$")


def memory_word(jobs: Path, job_id: str) -> MemoryWord | None:
    """Slurm's message about memory in the logs of a job, such as 12_3; None if there is none."""
    sentences: list[str] = []
    ranks: dict[str, set[int]] = {"Out Of Memory": set(), "Killed": set()}
    several = False
    for path in sorted(jobs.glob(f"{job_id}_*_log.err")):
        for line in text_at_end(path).splitlines():
            if (match := _SENTENCE.search(line)) is not None:
                sentences.append(match["said"].strip())
            elif (match := _TASK.search(line)) is not None:
                ranks[match["how"]].add(int(match["rank"]))
            elif _TASKS.search(line) is not None:
                several = True
    if not sentences:
        return None
    # "Killed" also names tasks that were ended because another task had exceeded its memory.
    named = ranks["Out Of Memory"] or (ranks["Killed"] if not several else set())
    message = next((sentence for sentence in sentences if "StepId=" in sentence), sentences[0])
    return MemoryWord(message[:300], named.pop() if len(named) == 1 else None)


# For this time after its submission, a job that Slurm does not know may still be on its way into the queue.
_FRESH_SECONDS = 60.0
_WAITING = frozenset("PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT".split())
_ALIVE = frozenset("RUNNING COMPLETING SUSPENDED STOPPED SIGNALING STAGE_OUT RESIZING".split())
# --all: also partitions that squeue hides by default.
_QUEUE = ("squeue", "--noheader", "--all", "--array", "--states=all")
_SQUEUE = "--format=%j|%F|%K|%A|%T|%r|%M|%N"
_SACCT = "--format=JobName,JobID,State,ExitCode,ElapsedRaw,NodeList,Reason"


def slurm_states(submitted: Sequence[Submission], sweep: Path) -> dict[JobKey, JobState]:
    """The state of every job of these submissions: one query to the accounting and one to the queue."""
    numbers = [submission.job_id for submission in submitted if submission.job_id is not None]
    jobs = f"--jobs={','.join(numbers)}"
    # In this order: if a job runs according to the accounting and a later squeue does not know it, it is lost.
    if len(numbers) < len(submitted):
        # An interrupted submission has no job number yet.
        accounting = accounted_since(min(submission.created for submission in submitted), _SACCT)
        queue = ask_slurm(*_QUEUE, _SQUEUE)
    else:
        # A query by time omits jobs that were never ready to start, such as a job that was held until it was cancelled.
        accounting = ask_slurm("sacct", "--noheader", "--parsable2", _SACCT, jobs, seconds=ACCOUNTING_SECONDS)
        queue = ask_slurm(*_QUEUE, _SQUEUE, jobs)
    if "Invalid job id" in queue.errors:
        # One unknown number alone is an error to squeue; among several numbers, squeue ignores it.
        queue = Reply(output="")
    recorded, live = _recorded(accounting.output or ""), _queued(queue.output or "")
    known = {token for token, _ in recorded}
    states = {}
    for submission in submitted:
        for index, run in enumerate(submission.runs):
            key = (submission.token, index)
            last = recorded.get(key)
            state = _merged(live.get(key), last, queue, accounted=accounting.output is not None)
            never_started = last is None or (last.state == "pending" and last.job_id is None)
            if state.state == "gone" and never_started and submission.token in known:
                made_by = RunFolder(sweep / run).job() or {}
                if (made_by.get("token"), made_by.get("index")) != key:
                    # Slurm keeps no record of a single array element that is cancelled while it waits: it removes the
                    # element from its array (Slurm 22.05, _job_str_signal of slurmctld).
                    state = JobState(state="ended", raw="CANCELLED", job_id=f"{submission.job_id}_{index}")
            is_fresh = submission.state == "intent" or time.time() - submission.created < _FRESH_SECONDS
            states[key] = JobState(state="unknown") if state.state == "gone" and is_fresh else state
    return states


def _merged(live: JobState | None, recorded: JobState | None, queue: Reply, *, accounted: bool) -> JobState:
    """The state of one job from queue and accounting, which may contradict each other for some seconds."""
    is_accounted = recorded is not None and recorded.state == "ended"
    awaited = accounted and not is_accounted
    if live is not None and live.state == "ended" and awaited and not live.never_started and end_of(live) is None:
        # The accounting will soon know the exit code. Do not wait for it if Slurm's state explains the end: for a job
        # that was cancelled after its requeue, the accounting may say PENDING for minutes.
        return replace(live, state="running")
    if live is not None and (live.state != "ended" or not is_accounted):
        return live
    if recorded is not None and is_accounted:
        return recorded
    if queue.output is None:
        return JobState(state="unknown", raw=UNANSWERED, reason=f"the scheduler does not answer: {queue.problem}")
    return JobState(state="gone", raw=recorded.raw if recorded else None, job_id=recorded.job_id if recorded else None)


def _queued(text: str) -> dict[JobKey, JobState]:
    """The states in the output of squeue."""
    states = {}
    for fields in _rows(text, 8):
        name, array, place, number, raw, reason, elapsed, nodes = fields
        state = _state(raw)
        if state == "pending" and reason == "BeginTime":
            # titanlab sets no begin time; Slurm sets one when it requeues a job.
            state = "requeued"
        states[token_of(name), int(place) if place.isdecimal() else 0] = JobState(
            state=state,
            raw=raw,
            reason=None if reason in ("None", "") else reason,
            elapsed_seconds=seconds_of(elapsed),
            nodes=tuple(hosts(nodes)),
            job_id=f"{array}_{place}" if place.isdecimal() else number,
        )
    return states


def _recorded(text: str) -> dict[JobKey, JobState]:
    """The states in the output of sacct, which lists a job before its steps."""
    states: dict[JobKey, JobState] = {}
    # Elements of an array that have not started share one line. It may be older than the line of a single element.
    waiting: dict[JobKey, JobState] = {}
    keys: dict[str, JobKey] = {}
    for name, number, words, code, elapsed, nodes, reason in _rows(text, 7):
        job, _, step = number.partition(".")
        array, bar, place = job.partition("_")
        raw = words.split()[0] if words else ""
        state = _state(raw)
        exit_code = _exit_code(code) if state == "ended" else None
        if step:
            # Numbered steps are those of srun; the batch file is a step too. The exit code of the job is that of srun,
            # which reports signal 9 as code 9; and sacct's DerivedExitCode misses steps that end just after their job.
            killed = step.isdecimal() and exit_code is not None and exit_code < 0
            if killed and job in keys and states[keys[job]].exit_code:
                states[keys[job]] = replace(states[keys[job]], exit_code=exit_code)
            continue
        job_state = JobState(
            state=state,
            raw=raw,
            exit_code=exit_code,
            reason=None if reason in ("None", "") else reason,
            elapsed_seconds=float(elapsed) if elapsed.isdecimal() else None,
            nodes=tuple(hosts(nodes)) if not nodes.startswith("None") else (),
            job_id=job,
        )
        if bar and not place.isdecimal():
            for index in elements_of(place):
                job_id = f"{array}_{index}" if state == "ended" else None
                waiting[token_of(name), index] = replace(job_state, exit_code=None, job_id=job_id)
        else:
            keys[job] = (token_of(name), int(place) if bar else 0)
            states[keys[job]] = job_state
    return {**waiting, **states}


def _rows(text: str, count: int) -> list[list[str]]:
    return [fields for line in text.splitlines() if len(fields := line.split("|")) == count]


def _state(raw: str) -> str:
    if raw in _WAITING:
        return "requeued" if raw.startswith("REQUEUE") else "pending"
    return "running" if raw in _ALIVE else "ended"


def _exit_code(text: str) -> int | None:
    """Slurm's `CODE:SIGNAL`."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    # A larger number is not a signal: Slurm writes 0:125 when a job exceeds its memory.
    if match is None or int(match[2]) > 64:
        return None
    return int(match[1]) or -int(match[2])
