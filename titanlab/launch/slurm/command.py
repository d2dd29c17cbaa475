"""Runs commands of Slurm with a time limit, and reads its answers: lists of hosts, states of jobs, why they ended.

Slurm is asked by job numbers, but only lines whose job name ends with the submission's token are used: after a reset
Slurm counts from the beginning, and another job may have the same number.

A process of a job runs scontrol itself, unless the job has a container: images seldom contain Slurm's commands, and
rarely those of the site's version. Then the process writes the arguments into a file, and a loop in the batch file,
outside the container, runs scontrol with them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titanlab.distributed import QUESTIONS
from titanlab.launch.contract import UNANSWERED, JobKey, JobState, MemoryWord, StopReason
from titanlab.launch.submission import Submission, token_of
from titanlab.records import OutcomeKind, RunFolder, text_at_end
from titanlab.system import CommandResult, run_command

# Slurm's commands give up after about 10 s (MessageTimeout) and say why; a command that takes longer is killed.
ANSWER_SECONDS = 15.0
# The accounting database serves many users and is slower.
ACCOUNTING_SECONDS = 30.0
# Users set these variables to filter and format the output of Slurm's commands; titanlab could not read it then.
_PERSONAL = ("SACCT_", "SCANCEL_", "SINFO_", "SQUEUE_")
# Slurm prints lists of array elements in full, not only 64 characters, and times in the format that is parsed here.
_OURS = {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer of a Slurm command.

    Attributes:
        output: what the command printed; None if it failed or did not answer.
        problem: why there is no output, in one line; None if there is output.
    """

    output: str | None
    errors: str = ""
    problem: str | None = None
    is_here: bool = True


def ask_slurm(*words: str, seconds: float = ANSWER_SECONDS) -> Reply:
    """Run a command of Slurm and wait for its answer; after the time limit it is killed."""
    if shutil.which(words[0]) is None:
        return Reply(output=None, problem=f"there is no {words[0]} on PATH", is_here=False)
    config = os.environ.get("SLURM_CONF")
    if config is not None and not (os.path.isfile(config) and os.access(config, os.R_OK)):
        # Slurm's commands would look for the file for a minute before they report this.
        return Reply(output=None, problem=f"SLURM_CONF={config} is not a readable file")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_PERSONAL)}
    begin = time.monotonic()
    answer = run_command(*words, seconds=seconds, environ={**kept, **_OURS})
    if answer is None:
        return Reply(output=None, problem=f"{words[0]} gave no answer within {seconds:g} s")
    if answer.code:
        # A command repeats its messages while it retries; the last lines give the result.
        lines = [" ".join(line.split()) for line in (answer.errors or answer.output).splitlines() if line.strip()]
        message = "; ".join(dict.fromkeys(lines[-2:])) or f"exit code {answer.code}"
        waited = round(time.monotonic() - begin)
        after = f" after {waited} s" if waited else ""
        return Reply(output=None, errors=answer.errors, problem=f"{words[0]} says{after}: {message[:300]}")
    return Reply(output=answer.output, errors=answer.errors)


def accounted_since(since: float, *words: str) -> Reply:
    """The output of sacct for the user's jobs that were ready to start after `since` (seconds since the epoch)."""
    # Begin one day earlier, because clocks may differ.
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 86_400))
    return ask_slurm("sacct", "--noheader", "--parsable2", f"--starttime={start}", *words, seconds=ACCOUNTING_SECONDS)


def seconds_of(text: str) -> float | None:
    """Slurm's `[DAYS-][HOURS:]MINUTES:SECONDS`; None for other text, such as `infinite`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


_POLL_SECONDS = 0.2
_NODE_SECONDS = 30.0
# Times are printed in UTC: the time zone of a container may differ from the node's.
_FORMAT = {"TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
# The loop and the batch file ignore signals, which Slurm sends to all processes of an ending job: ranks still save.
_LOOP = """\
trap : TERM
(
  trap '' TERM INT USR1 USR2 XCPU
  cd "$TITANLAB_SCONTROL" || exit
  while kill -0 $$; do
    for question in *.ask; do
      [ -e "$question" ] || continue
      mapfile -t words <"$question"
      rm "$question"
      name=${question%.ask}
      {
        FORMAT scontrol "${words[@]}" >"$name.out" 2>&1
        echo $? >"$name.part"
        mv "$name.part" "$name.code"
      } &
    done
    sleep 1
  done
) </dev/null >/dev/null 2>&1 &"""


def answering_lines(jobs: Path) -> list[str]:
    """Lines of a batch file that answer the questions of the job's processes, in a folder where the job may write."""
    # Questions of an earlier start of the job must not be answered.
    start = ['rm -rf -- "$TITANLAB_SCONTROL"', 'mkdir -p -- "$TITANLAB_SCONTROL"']
    setting = " ".join(f"{name}={value}" for name, value in _FORMAT.items())
    folder = f'{shlex.quote(str(jobs))}/."$SLURM_JOB_ID"'
    return [f"export {QUESTIONS}={folder}", *start, _LOOP.replace("FORMAT", setting)]


def scontrol(*words: str, seconds: float) -> CommandResult | None:
    """Run scontrol, which prints times in UTC, and wait for its end; None if it is missing or takes too long."""
    folder = os.environ.get(QUESTIONS)
    if folder is not None and (answer := _asked_outside(Path(folder), words, seconds)) is not None:
        return answer
    # There is no container, or the loop outside it does not answer: run scontrol here, which the image may contain.
    return run_command("scontrol", *words, seconds=seconds, environ={**os.environ, **_FORMAT})


def node_address(node: str) -> str | None:
    """The address by which Slurm reaches a node, for networks that do not resolve node names."""
    answer = scontrol("show", "node", "--oneliner", node, seconds=_NODE_SECONDS)
    match = re.search(r"\bNodeAddr=(\S+)", answer.output if answer is not None and answer.code == 0 else "")
    return match[1] if match else None


def _asked_outside(folder: Path, words: tuple[str, ...], seconds: float) -> CommandResult | None:
    name, end = folder / secrets.token_hex(8), time.monotonic() + seconds
    ask, code, output = (name.with_suffix(suffix) for suffix in (".ask", ".code", ".out"))
    try:
        written = name.with_suffix(".new")
        written.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
        written.rename(ask)
        while not code.exists():
            if time.monotonic() > end:
                return None
            time.sleep(_POLL_SECONDS)
        text = output.read_text(encoding="utf-8", errors="replace")
        return CommandResult(code=int(code.read_text()), output=text, errors="")
    except (OSError, ValueError):
        return None
    finally:
        with contextlib.suppress(OSError):
            for file in (ask, code, output):
                file.unlink(missing_ok=True)


# MaxArraySize is at most 4,000,001.
_LARGEST = 4_000_000


def elements_of(text: str) -> list[int]:
    """The array indices in a text of Slurm: `[0-2,7%4]` → 0, 1, 2, 7; `%4` only limits how many jobs run at once.

    Other text, such as the `...` of a shortened listing, is skipped.
    """
    elements: list[int] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        first, last, step = (int(match[1]), int(match[2] or match[1]), int(match[3] or 1)) if match else (0, -1, 1)
        if last <= _LARGEST and step:
            elements += range(first, last + 1, step)
    return elements


def expression_of(elements: Iterable[int]) -> str:
    """The shortest list of ranges for these array indices: `0-3,7`."""
    ranges: list[tuple[int, int]] = []
    for element in sorted(set(elements)):
        if ranges and element == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], element)
        else:
            ranges.append((element, element))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def hosts(nodes: str) -> list[str]:
    """The hosts of Slurm's short form: `gpu[03-04,12],n1` → gpu03, gpu04, gpu12, n1; also with several brackets."""
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^]]*\])+", nodes):
        choices: list[list[str]] = []
        for place, part in enumerate(re.split(r"\[([^]]*)\]", word)):
            # Every second part was inside brackets.
            choices.append([])
            for number in part.split(",") if place % 2 else [part]:
                first, _, last = number.partition("-")
                if place % 2 and first.isdecimal() and (not last or last.isdecimal()):
                    # Keep leading zeros.
                    choices[-1] += [f"{value:0{len(first)}d}" for value in range(int(first), int(last or first) + 1)]
                else:
                    choices[-1].append(number)
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return names


# The signal that Slurm reports if a node cannot open a job's output files; no process received it.
_NO_LOGS = 53
# The reason that Slurm gives if no node can ever fulfil the request.
REFUSED = "BadConstraints"
_WORDS: Mapping[str, tuple[OutcomeKind, str]] = {
    "TIMEOUT": (OutcomeKind.WALLTIME, "the job's time limit was reached before it could save"),
    "DEADLINE": (OutcomeKind.WALLTIME, "the job's deadline was reached before it could save"),
    "NODE_FAIL": (OutcomeKind.NODE_FAIL, "a node of the job failed"),
    "BOOT_FAIL": (OutcomeKind.NODE_FAIL, "a node of the job could not be started"),
    "OUT_OF_MEMORY": (OutcomeKind.OOM, "the job used more memory than it was given"),
    "CANCELLED": (OutcomeKind.CANCELLED, "the job was cancelled"),
    "PREEMPTED": (OutcomeKind.PREEMPTED, "the job was preempted before it could save"),
    "REVOKED": (OutcomeKind.CANCELLED, "the job was revoked"),
}


def end_of(state: JobState) -> StopReason | None:
    """Why a job ended, if the name of its state alone explains it."""
    if state.exit_code == -_NO_LOGS:
        cause = "Slurm could not write the job's logs on its node (signal 53): do the nodes share the folder of runs?"
        return StopReason(kind=OutcomeKind.CRASH, cause=cause)
    known = _WORDS.get(state.raw or "")
    return StopReason(kind=known[0], cause=known[1]) if known is not None else None


def end_in_queue(state: JobState) -> StopReason | None:
    """Why a job ended that never started, if Slurm's state and reason explain it."""
    if state.raw in ("CANCELLED", "REVOKED"):
        return StopReason(kind=OutcomeKind.CANCELLED, cause="the job was cancelled before it started")
    if state.raw == "DEADLINE":
        return StopReason(kind=OutcomeKind.WALLTIME, cause="the job's deadline passed before it started")
    if state.raw == "FAILED":
        kind = OutcomeKind.INFEASIBLE if state.reason == REFUSED else OutcomeKind.CRASH
        cause = f"Slurm failed the job before it started: {state.reason or 'it gives no reason'}"
        return StopReason(kind=kind, cause=cause)
    return None


# Messages of slurmstepd, which watches the memory of a step by its own count (OverMemoryKill) or the control group's.
# "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed."
# "slurmstepd-n1: error: StepId=12.0 exceeded memory limit (1176580096 > 1073741824), being killed"
_SENTENCE = re.compile(
    r"slurmstepd[^:]*: error: (?P<said>.*(?:oom[-_ ]?kill|exceeded (?:\w+ )?memory limit).*)$", re.IGNORECASE
)
# srun's lines about one task or more: "srun: error: n1: task 1: Out Of Memory", "srun: error: n1: tasks 0-1: Killed".
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
    return MemoryWord(f"Slurm says: {message[:300]}", named.pop() if len(named) == 1 else None)


# For this time after its submission, a job that Slurm does not know may still be on its way into the queue.
_FRESH_SECONDS = 60.0
_WAITING = frozenset("PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT".split())
_ALIVE = frozenset("RUNNING COMPLETING SUSPENDED STOPPED SIGNALING STAGE_OUT RESIZING".split())
# --all: list jobs of those partitions too that squeue hides by default.
_QUEUE = ("squeue", "--noheader", "--all", "--array", "--states=all")
_SQUEUE = "--format=%j|%F|%K|%A|%T|%r|%M|%N"
_SACCT = "--format=JobName,JobID,State,ExitCode,ElapsedRaw,NodeList,Reason"


def slurm_states(submitted: Sequence[Submission], sweep: Path) -> dict[JobKey, JobState]:
    """The state of every job of these submissions: one query to the accounting and one to the queue."""
    numbers = [submission.job_id for submission in submitted if submission.job_id is not None]
    jobs = f"--jobs={','.join(numbers)}"
    # Ask the accounting first: a job is lost if it runs there and squeue, asked later, does not know it.
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
        # Until the accounting knows the exit code, say that the job runs. No need to if Slurm's state explains the end:
        # for a job that was cancelled after its requeue, the accounting may say PENDING for minutes.
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
    # Elements of an array that have not started share one line, which may be older than the line of a single element.
    waiting: dict[JobKey, JobState] = {}
    keys: dict[str, JobKey] = {}
    for name, number, words, code, elapsed, nodes, reason in _rows(text, 7):
        job, _, step = number.partition(".")
        array, bar, place = job.partition("_")
        raw = words.split()[0] if words else ""
        state = _state(raw)
        exit_code = _exit_code(code) if state == "ended" else None
        if step:
            # Use the exit code of a killed step of srun, which has a number (the batch file is a step too). The job's
            # own code is srun's, 9 for signal 9. sacct's DerivedExitCode misses steps that end just after their job.
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
    """The exit code in Slurm's `CODE:SIGNAL`; -N for signal N."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    # A larger number is not a signal: Slurm writes 0:125 when a job exceeds its memory.
    if match is None or int(match[2]) > 64:
        return None
    return int(match[1]) or -int(match[2])
