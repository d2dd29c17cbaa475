"""`python -m titanlab.launch.local.supervisor FOLDER`: runs a sweep's jobs on this host, in order, a few at once.

A submission starts it; it ends after the last job. If it is killed, its jobs run on; the next supervisor finds them by
their records beside the submissions, and continues. For each job, submitit's controller starts the processes of the
ranks and watches them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from titanlab.distributed.host import CORES, cores, this_host
from titanlab.distributed.ranks import MEETING
from titanlab.distributed.stop import handled
from titanlab.errors import ConfigError
from titanlab.launch.local.queue import (
    LOCK,
    LOG,
    LocalJob,
    last_error,
    local_job,
    local_submissions,
    python_environment,
    write_local_job,
)
from titanlab.launch.submission import Submission, claim_sweep, jobs_folder
from titanlab.records.claim import claimed
from titanlab.records.outcome import OutcomeKind, first_line
from titanlab.records.run_folder import RunFolder
from titanlab.system.files import disk_fault
from titanlab.system.processes import born_at
from titanlab.system.text import counted

_LOG = re.compile(r"[0-9]+_0_log\.out")
# submitit's controller needs a time limit; this one is never reached. Ranks have their own watchdogs.
_MINUTES = 10 * 365 * 24 * 60


def start(
    sweep: Path, submission: Submission, index: int, devices: Sequence[str], *, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the processes of a run. Returns the controller, which ends when they all have ended.

    Args:
        devices: accelerators for this job alone.
        variables: further environment variables of the job.
    """
    from submitit.local.local import start_controller

    environment = {**python_environment(sweep, submission), **variables}
    words = [word for name in MEETING for word in ("-u", name)]
    words += [f"{name}={value}" for name, value in environment.items()]
    command = [sys.executable, *submission.command(sweep, index)]
    # Relative paths in a recipe are relative to the folder in which it was submitted.
    shell = ["sh", "-c", 'cd "$0" 2> /dev/null; exec env "$@"', submission.folder, *words, *command]
    folder = _folder(sweep, submission.token, index)
    folder.mkdir(parents=True, exist_ok=True)
    # submitit's LocalExecutor would pickle a function, and does not give its process to the caller.
    return start_controller(
        folder,
        shlex.join(shell),
        tasks_per_node=submission.shape.processes,
        cuda_devices=",".join(devices),
        timeout_min=_MINUTES,
    )


def controller_of(sweep: Path, token: str, index: int) -> int | None:
    """The process number of a job's controller, from the names of its logs; None if there are no logs."""
    logs = {path: _LOG.fullmatch(path.name) for path in _folder(sweep, token, index).glob("*_0_log.out")}
    newest = max((path for path, match in logs.items() if match), key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else int(newest.name.partition("_")[0])


def _folder(sweep: Path, token: str, index: int) -> Path:
    return jobs_folder(sweep) / f"{token}_{index}"


_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 1.0
# Between two attempts to write to a full disk.
_FULL_DISK_SECONDS = 5.0
# If a supervisor died while it started a job, the job's controller has opened its logs after this time.
_SETTLED_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One job of a submission."""

    submission: Submission
    index: int

    @property
    def key(self) -> tuple[str, int]:
        return self.submission.token, self.index

    @property
    def run(self) -> str:
        return self.submission.runs[self.index]

    @property
    def room(self) -> int:
        """The number of processes that all jobs together may run at once: `launch.at_once`, or one per core."""
        at_once: int | None = self.submission.launch.get("at_once")
        return cores() if at_once is None else at_once

    @property
    def processes(self) -> int:
        return self.submission.shape.processes


@dataclass(frozen=True, kw_only=True)
class _RunningJob:
    """A job that was started by this supervisor or by an earlier one."""

    job: _Job
    record: LocalJob
    process: subprocess.Popen[bytes] | None
    devices: tuple[str, ...] = ()


class Supervisor:
    """Runs the jobs of one sweep on this host.

    Args:
        sweep: its folder.
        devices: accelerators that the jobs share, as in CUDA_VISIBLE_DEVICES; None: those of this host.
    """

    def __init__(self, sweep: Path, *, devices: Sequence[str] | None = None) -> None:
        self._sweep = sweep
        self._devices = tuple(visible_devices(os.environ) if devices is None else devices)
        self._running: dict[tuple[str, int], _RunningJob] = {}
        self._waiting: list[_Job] = []
        self._seen: set[str] = set()
        self._ending = False

    def run(self, lock: contextlib.ExitStack) -> None:
        """Run jobs until all have ended; then release the lock.

        Args:
            lock: released while the sweep is claimed: a concurrent submission sees either a supervisor that will still
                read the submission, or none.
        """
        while not (self._ending and not self._running):
            try:
                self._collect()
                self._read_submissions()
            except OSError as error:
                # A full disk takes no records: running jobs continue, and none is started until there is space.
                fault = disk_fault(error)
                if fault is None:
                    raise
                _say(fault)
                time.sleep(_FULL_DISK_SECONDS)
                continue
            if self._waiting and not self._ending and self._has_room(self._waiting[0]):
                self._start(self._waiting[0])
            elif self._waiting or self._running:
                time.sleep(_POLL_SECONDS)
            elif self._is_over(lock):
                _say("all jobs have ended")
                return
        _say("told to end; what waits stays in the queue")

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: ask all jobs to save and end, and start no more."""
        self._ending = True
        for running in self._running.values():
            record = running.record
            # On another host, the process number belongs to another process.
            if record.is_here and record.is_alive(self._run(running.job)) and record.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGTERM)

    def _is_over(self, lock: contextlib.ExitStack) -> bool:
        with contextlib.suppress(ConfigError), claim_sweep(self._sweep):
            self._read_submissions()
            if not self._waiting and not self._running:
                lock.close()
                return True
        return False

    def _read_submissions(self) -> None:
        """Read the submissions: collect waiting jobs in order, and take over jobs that an earlier supervisor left."""
        tokens = {path.stem for path in (self._sweep / "submissions").glob("*.json")}
        if tokens == self._seen:
            return
        self._seen = tokens
        self._waiting = []
        submitted = local_submissions(self._sweep)
        for job in _in_order(submitted):
            record = local_job(self._sweep, *job.key)
            if record is None:
                self._waiting.append(job)
            elif record.state in ("starting", "running") and job.key not in self._running:
                self._take_over(job, record)

    def _take_over(self, job: _Job, record: LocalJob) -> None:
        if record.state == "starting":
            pid = self._controller_left_by_predecessor(job, record)
            if pid is None and not self._run(job).is_claimed():
                # The supervisor died before it had started a process.
                self._waiting.append(job)
                return
            record = replace(record, state="running", pid=pid, born=None if pid is None else born_at(pid))
            write_local_job(self._sweep, *job.key, record)
        _say(f"{job.run} was started by an earlier supervisor")
        self._running[job.key] = _RunningJob(job=job, record=record, process=None, devices=record.devices)

    def _controller_left_by_predecessor(self, job: _Job, record: LocalJob) -> int | None:
        """The controller that an earlier supervisor started just before it died; waits until its logs must exist."""
        while (pid := controller_of(self._sweep, *job.key)) is None:
            if time.time() - (record.started or 0.0) >= _SETTLED_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
        return pid

    def _collect(self) -> None:
        """Record the jobs that have ended."""
        for key, running in list(self._running.items()):
            run, process = self._run(running.job), running.process
            alive = running.record.is_alive(run) if process is None else process.poll() is None
            # When a controller is killed, its tasks live on and keep their claim of the run.
            if alive or run.is_claimed():
                continue
            record = local_job(self._sweep, *key) or running.record
            cause = self._controller_fault(process)
            write_local_job(self._sweep, *key, replace(record, state="ended", ended=time.time(), cause=cause))
            del self._running[key]
            _say(f"{running.job.run} has ended")

    def _controller_fault(self, process: subprocess.Popen[bytes] | None) -> str | None:
        """Why a controller that has ended failed; None if it did not: it ends with 0 whatever its ranks end with."""
        if process is None or not process.returncode or process.returncode < 0:
            return None
        fault = f"its controller ended with exit code {process.returncode}"
        # A controller's errors are in the same log as the supervisor's own lines.
        error = last_error(self._sweep)
        return fault if error is None else f"{fault}; {LOG} ends with: {error}"

    def _has_room(self, job: _Job) -> bool:
        """Whether a job fits beside the running ones; a job that is larger than the limit runs alone."""
        used = sum(running.job.processes for running in self._running.values())
        gpus = min(job.submission.shape.gpus_per_node, len(self._devices))
        return (used == 0 or used + job.processes <= job.room) and gpus <= len(self._free_devices())

    def _free_devices(self) -> list[str]:
        taken = {device for running in self._running.values() for device in running.devices}
        return [device for device in self._devices if device not in taken]

    def _start(self, job: _Job) -> None:
        """Start a waiting job, unless it has been cancelled."""
        devices = tuple(self._free_devices()[: job.submission.shape.gpus_per_node])
        try:
            # `titanlab cancel` claims the sweep too.
            with claim_sweep(self._sweep, patience_seconds=_PATIENCE_SECONDS):
                if not self._is_wanted(job):
                    self._waiting.remove(job)
                    return
                record = LocalJob(state="starting", started=time.time(), devices=devices)
                # Before the start: if this record cannot be written, the next supervisor would start the job again.
                write_local_job(self._sweep, *job.key, record)
                try:
                    process = start(self._sweep, job.submission, job.index, devices, variables=_cores(job))
                except Exception as error:
                    if isinstance(error, OSError) and disk_fault(error) is not None:
                        raise
                    # The next start would fail too. The job's end is recorded, and the supervisor lives on.
                    cause = f"could not be started: {first_line(error)}"
                    write_local_job(
                        self._sweep, *job.key, replace(record, state="ended", ended=time.time(), cause=cause)
                    )
                    self._waiting.remove(job)
                    _say(f"{job.run} {cause}")
                    return
                record = replace(record, state="running", pid=process.pid, born=born_at(process.pid))
                with contextlib.suppress(OSError):
                    write_local_job(self._sweep, *job.key, record)
        except ConfigError:
            return  # Another process has claimed the sweep: try again at the next poll.
        except OSError as error:
            fault = disk_fault(error)
            if fault is None:
                raise
            _say(f"{job.run} is not started: {fault}")
            time.sleep(_FULL_DISK_SECONDS)
            return
        self._waiting.remove(job)
        self._running[job.key] = _RunningJob(job=job, record=record, process=process, devices=devices)
        _say(f"{job.run} is started: {counted(job.processes, 'rank')}, controller {process.pid}")

    def _is_wanted(self, job: _Job) -> bool:
        record = local_job(self._sweep, *job.key)
        if record is not None and record.state != "starting":
            return False
        try:
            result = self._run(job).result()
        except ConfigError as error:
            # A damaged result stops only this job.
            _say(f"{job.run} is not started: {error}")
            write_local_job(self._sweep, *job.key, LocalJob(state="ended", ended=time.time()))
            return False
        if self._run(job).path.is_dir() and (result is None or result.kind is not OutcomeKind.DONE):
            return True
        write_local_job(self._sweep, *job.key, LocalJob(state="ended", ended=time.time()))
        return False

    def _run(self, job: _Job) -> RunFolder:
        return RunFolder(self._sweep / job.run)


def _in_order(submitted: Sequence[Submission]) -> list[_Job]:
    """All jobs in the order in which they should start: oldest batch first, then by the places of its runs."""
    batches: dict[str, int] = {}
    keys = {}
    for submission in submitted:
        batch = batches.setdefault(submission.batch or submission.token, len(batches))
        places = submission.places or range(len(submission.runs))
        keys.update({(submission.token, index): (batch, place) for index, place in enumerate(places)})
    jobs = [
        _Job(submission=submission, index=index) for submission in submitted for index in range(len(submission.runs))
    ]
    return sorted(jobs, key=lambda job: keys[job.key])


def visible_devices(environ: Mapping[str, str]) -> list[str]:
    """The accelerators that this process may use, as in CUDA_VISIBLE_DEVICES."""
    host = this_host()
    if host.accelerator != "cuda":
        return []
    visible = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return visible[: host.count] if visible else [str(number) for number in range(host.count)]


def _cores(job: _Job) -> dict[str, str]:
    """The same share of the cores for every process of a sweep, so that layouts can be compared."""
    return {CORES: str(max(1, cores() // max(job.room, job.processes)))}


def _say(text: str) -> None:
    # On a full disk, lose lines of the log rather than jobs.
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs of the sweep in a folder. Returns 0, also if another supervisor runs already."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    sweep = Path(path)
    supervisor = Supervisor(sweep)
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(claimed(sweep, "sweep", file=LOCK))
        except ConfigError:
            return 0
        _say(f"supervisor {os.getpid()} of {sweep.name}")
        # A shell starts background processes with SIGINT ignored. After this, children start with the default action.
        with handled((signal.SIGTERM, signal.SIGINT), supervisor.end):
            supervisor.run(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
