"""What every task of a job runs: `python -m titanlab.sweep.job.task SWEEP TOKEN [INDEX]`, once a rank.

It starts the rank's worker as a child and imports no torch itself. Rank 0 claims the run, begins the attempt, tells the
others where to meet, and sees to it that there is a result; each sees to its own worker. Without an index the job's
place in its array is taken.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from titanlab.checkpoint.folders import latest
from titanlab.data import source
from titanlab.distributed.host import check_host, this_host
from titanlab.distributed.stop import ONE_WISH_SECONDS, STOP_SIGNALS, handled
from titanlab.errors import ConfigError, TitanlabError
from titanlab.launch.attempt import begin, conclude, keep_tokenizer, missed_checkpoint
from titanlab.launch.child import Child
from titanlab.recipe.recipe import Recipe, from_mapping
from titanlab.records.outcome import Outcome, OutcomeKind, from_exception
from titanlab.records.run_folder import RunFolder, open_run
from titanlab.sweep.job import rendezvous
from titanlab.sweep.job.hold import hold_code, hold_run
from titanlab.sweep.job.place import Place, address_of, free_port, give_name, place_in
from titanlab.sweep.job.rank_watch import RankWatch, await_result, settle
from titanlab.sweep.job.rendezvous import Rendezvous
from titanlab.sweep.job.wish import meaning, put_back, read_wish, write_wish
from titanlab.sweep.submission import Submission, submissions
from titanlab.system.atomic_file import write_json
from titanlab.system.disk import disk_fault

CLAIM_SECONDS = 3.0
# Of one that was put back into the queue: the processes of its last start may take a moment to go.
CLAIM_AGAIN_SECONDS = 30.0
# ... and if their node is dead, a file server keeps its locks for a lease, 90 s for NFS, and some time of grace.
CLAIM_DEAD_SECONDS = 150.0
# For rank 0 to find out what a signal means, before another one does.
WISH_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process of one start of a job.

    Attributes:
        run: what it works on.
        place: of the process.
        token, index: of the submission, and the run's index there.
        launch: the launcher's config that it was submitted under; the run was born under another, perhaps.
        code: folder of the code that it was submitted with; None: whichever runs.
        heard: signals that have come and when, oldest first.
    """

    run: RunFolder
    place: Place
    token: str
    index: int
    launch: Mapping[str, Any] = field(default_factory=dict)
    code: Path | None = None
    heard: list[tuple[int, float]] = field(default_factory=list)

    @property
    def start(self) -> str:
        """Shared by the processes of this start, and by no others."""
        return f"{self.token}/{self.index} {self.place.start}"

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which keeps the record."""
        return self.place.ranks.rank == 0

    @property
    def is_hurried(self) -> bool:
        """Whether a second wish has come from a person, who does not want to wait. Slurm sends several by itself."""
        numbers = [when for _, when in self.heard]
        return self.place.launcher == "local" and bool(numbers) and numbers[-1] - numbers[0] > ONE_WISH_SECONDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank. Returns the exit code: the outcome's, so that the scheduler knows a failure for one."""
    folder, token, *rest = sys.argv[1:] if arguments is None else arguments
    place = place_in(os.environ)
    with _hearing() as heard:
        try:
            index = int(rest[0]) if rest else place.index or 0
            run, submission = _submitted(Path(folder), token, index)
            code, launch = Path(folder) / submission.code, submission.launch
            job = Job(run=run, place=place, token=token, index=index, launch=launch, code=code, heard=heard)
            if job.leads and place.index is not None and not place.restart and len(submission.runs) > 1:
                name = submission.job_name(Path(folder).name, index)
                # Beside everything else: a controller that is busy answers late.
                threading.Thread(target=give_name, args=(place, name), name="job-name", daemon=True).start()
            return _lead(job) if job.leads else _follow(job)
        except TitanlabError as error:
            _say(f"error: {error}")
            return error.exit_code
        except OSError as error:
            fault = disk_fault(error)
            if fault is None:
                raise
            _say(f"error: {fault}")
            return OutcomeKind.CRASH.exit_code


def _lead(job: Job) -> int:
    """Rank 0: keep the record."""
    if _is_done(job):
        return _nothing_to_do(job, "is done")
    goes_on = _goes_on(job)
    with contextlib.ExitStack() as stack:
        seconds = CLAIM_DEAD_SECONDS if goes_on else CLAIM_AGAIN_SECONDS if job.place.restart else CLAIM_SECONDS
        refused = hold_run(job.run, stack, seconds=seconds, is_told=lambda: bool(job.heard))
        if refused is not None and not goes_on:
            # Another job has it: whatever there is to do, it does.
            _say(f"{job.run.path.name} {refused}: nothing is done twice")
            return _nothing_to_do(job, refused)
        if refused is not None:
            # Its own earlier start has, which is dead: nobody else goes on with it.
            _say(f"{job.run.path.name} {refused}, from an earlier start of this job")
            if not job.heard:
                _back_into_queue(job)
            return _nothing_to_do(job, refused, code=OutcomeKind.NODE_FAIL.exit_code)
        if _is_done(job):
            return _nothing_to_do(job, "is done")
        before = latest(job.run.checkpoints)
        outcome = _attempted(job)
        _say(f"{outcome.kind.value} at step {outcome.step}: {outcome.cause or outcome.kind.meaning}")
        _put_back(job, outcome, came_on=latest(job.run.checkpoints) != before)
    return _exit_code(outcome)


def _nothing_to_do(job: Job, reason: str, *, code: int = 0) -> int:
    """Tell the other ranks that there will be no attempt. Returns the exit code."""
    rendezvous.publish(job.run, Rendezvous(start=job.start, reason=reason))
    return code


def _goes_on(job: Job) -> bool:
    """Whether the run's newest attempt is of an earlier start of this job."""
    made_by = job.run.job() or {}
    return job.place.restart > 0 and (made_by.get("token"), made_by.get("index")) == (job.token, job.index)


def _attempted(job: Job) -> Outcome:
    """One attempt at a claimed run, from its beginning to its result."""
    run, place = job.run, job.place
    config = run.config()
    if job.launch:
        config["launch"] = dict(job.launch)
    try:
        if job.code is not None:
            hold_code(job.code)
        recipe = from_mapping(config)
        address = address_of(place, os.environ)
        missed = missed_checkpoint(run)
        if missed is not None:
            _say(missed)
        attempt = begin(run, recipe, this_host(), started_by=place.launcher)
    except Exception as error:
        # It is the run's end all the same, and the other ranks wait to be told.
        attempt = run.begin_attempt(config, None)
        write_json(run.attempt_folder(attempt) / "job.json", _facts(job))
        outcome = from_exception(error, rank=0, attempt=attempt)
        run.write_result(outcome)
        rendezvous.publish(run, Rendezvous(start=job.start, attempt=attempt))
        return outcome
    write_json(run.attempt_folder(attempt) / "job.json", _facts(job))
    there = Rendezvous(start=job.start, attempt=attempt, address=address, port=free_port(os.environ))
    rendezvous.publish(run, there)
    where = ", ".join(place.nodes)
    _say(f"{run.path.name}, attempt {attempt}: {place.ranks.world} processes on {where}, job {place.job_id}")
    code = _watched(job, recipe, there)
    if run.result(attempt) is None:
        settle(run, attempt, place.ranks.world)
    return run.result(attempt) or conclude(run, attempt, {0: code} if code else {})


def _follow(job: Job) -> int:
    """Every other rank: join the attempt that rank 0 has begun."""
    if _is_done(job):
        return 0
    there = rendezvous.wait(job.run, job.start)
    if there.reason:
        _say(f"{job.run.path.name} {there.reason}: nothing is done twice")
        return 0
    code = _watched(job, from_mapping(job.run.config(there.attempt)), there) if there.port else 1
    # Whoever leaves before the end is recorded may have the scheduler end rank 0, which records it.
    outcome = await_result(job.run, there.attempt, job.place.ranks.world)
    return code if outcome is None else _exit_code(outcome)


def _watched(job: Job, recipe: Recipe, there: Rendezvous) -> int:
    """Run this rank's worker to its end. Returns its exit code; if that is bad, there is a note of why."""
    run, ranks = job.run, replace(job.place.ranks, address=there.address, port=there.port)
    attempt = run.attempt_folder(there.attempt)
    try:
        if job.code is not None:
            hold_code(job.code)
        cluster = recipe.cluster
        check_host(this_host(), accelerator=cluster.accelerator, device=cluster.device, processes=ranks.local_world)
        if job.leads:
            source.prepare(recipe.data, report=_say)
            keep_tokenizer(run, recipe)
        child = Child(
            run.path,
            ranks,
            config=run.config(there.attempt),
            log=run.logs / f"rank-{ranks.rank}.log",
            environment=_environment(recipe),
        )
    except Exception as error:
        note = from_exception(error, rank=ranks.rank, attempt=there.attempt)
        run.write_failure(note)
        if note.traceback:
            traceback.print_exception(error)
        return note.exit_code or 1
    signal_seconds = float(getattr(recipe.launch, "signal_seconds", 0))
    return RankWatch(
        run,
        there.attempt,
        child,
        rank=ranks.rank,
        world=ranks.world,
        hear=lambda: _hear(job, attempt, signal_seconds),
        is_hurried=lambda: job.is_hurried,
    ).to_end()


def _hear(job: Job, attempt: Path, signal_seconds: float) -> None:
    """Find out what the signals of this process mean, if nobody has, and write it down for all ranks."""
    asked = job.run.asked_to_cancel() if job.leads or job.heard else None
    if not job.heard and asked is None:
        return
    number, when = job.heard[0] if job.heard else (int(signal.SIGTERM), time.monotonic())
    late = time.monotonic() - when > WISH_SECONDS
    if read_wish(attempt) is None and (job.leads or late):
        wish = meaning(number, job.place, signal_seconds=signal_seconds, cancelled_by=asked)
        stands = write_wish(attempt, wish)
        _say(f"{stands.kind.value}: {stands.cause}; the ranks are told to save and end")


def _put_back(job: Job, outcome: Outcome, *, came_on: bool) -> None:
    """Put a job that was not at fault back into the queue; its next start goes on from the checkpoint."""
    if job.place.launcher != "slurm" or outcome.kind not in (OutcomeKind.PREEMPTED, OutcomeKind.WALLTIME):
        return
    if outcome.kind is OutcomeKind.WALLTIME and not came_on:
        _say("not put back into the queue: this attempt has saved nothing, and the next one would not either")
    else:
        _back_into_queue(job)


def _back_into_queue(job: Job) -> None:
    launch = job.launch
    if not launch.get("requeue", False):
        _say("not put back into the queue: launch.requeue=false")
    elif job.place.restart >= launch.get("max_requeues", 0):
        _say(f"not put back into the queue: it has been {job.place.restart} times (launch.max_requeues)")
    else:
        refused = put_back(job.place)
        _say(f"not put back into the queue: {refused}" if refused else "put back into the queue")


def _is_done(job: Job) -> bool:
    done = job.run.result()
    if done is None or done.kind is not OutcomeKind.DONE:
        return False
    _say(f"{job.run.path.name} is done: {done.steps} steps")
    return True


def _facts(job: Job) -> dict[str, Any]:
    place = job.place
    return {
        "schema": 1,
        "launcher": place.launcher,
        "job_id": place.job_id,
        "raw_job_id": place.raw_job_id,
        "restart_count": place.restart,
        "nodes": list(place.nodes),
        "token": job.token,
        "index": job.index,
        "started": time.time(),
    }


def _environment(recipe: Recipe) -> dict[str, str]:
    """Variables for the worker: the cores that Slurm has given to this task, where nobody else says how many."""
    cores = os.environ.get("SLURM_CPUS_PER_TASK")
    if cores is None or "OMP_NUM_THREADS" in os.environ or recipe.launch.threads is not None:
        return {}
    return {"OMP_NUM_THREADS": cores}


def _exit_code(outcome: Outcome) -> int:
    wrong = OutcomeKind.INFEASIBLE.exit_code
    return wrong if outcome.exit_code == wrong else outcome.kind.exit_code


def _submitted(sweep: Path, token: str, index: int) -> tuple[RunFolder, Submission]:
    for submission in submissions(sweep):
        if submission.token == token and index < len(submission.runs):
            return open_run(sweep / submission.runs[index]), submission
    # An intent that was dropped: another job has its runs.
    raise ConfigError("submission", f"{token}/{index}", f"is not in {sweep}", "submit the sweep again")


@contextlib.contextmanager
def _hearing() -> Iterator[list[tuple[int, float]]]:
    """Collect signals that ask for an end, instead of dying of them."""
    heard: list[tuple[int, float]] = []

    def handler(number: int, frame: FrameType | None) -> None:
        heard.append((number, time.monotonic()))

    with handled(STOP_SIGNALS, handler):
        yield heard


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
