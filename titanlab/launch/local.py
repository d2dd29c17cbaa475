"""launch=local: a single run starts at once; a supervisor on this host starts the runs of a sweep.

`python -m titanlab.launch.local SWEEP` is the supervisor, which the process that submits starts. It runs the jobs in
order, a few at once, and ends after the last job. Each job is one process that trains its run as `titanlab train` does.
Only the claims of the runs tell which jobs run: if a supervisor is killed, its jobs go on, and the next supervisor
waits for them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from titanlab.distributed import ALONE, CORES, MEETING, cores, handled_signals
from titanlab.errors import ConfigError
from titanlab.launch.contract import JobKey, JobState, Launcher, ProcessPlace
from titanlab.launch.evidence import early_end, may_work, printed_lines
from titanlab.launch.processes import DEVICES, visible_devices
from titanlab.launch.submission import Submission, claim_sweep, jobs_folder, submissions
from titanlab.records import Outcome, OutcomeKind, RunFolder, claimed, first_line, holder_of, is_claimed
from titanlab.system import born_at, counted, disk_fault, stopped_note

KIND = "local"
# The lock that the sweep's supervisor holds.
LOCK = ".supervisor"
LOG = "supervisor.log"
# Lines that the supervisor itself writes; other lines are error messages.
_OWN_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
# A job of another host, whose claim may not be seen here, counts as running for this time after its last status.
_SILENT_SECONDS = 60.0
# How long to wait for a new supervisor, which starts quickly because it does not import torch.
_START_SECONDS = 60.0
_START_POLL_SECONDS = 0.05
_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 1.0
# After an error of a full disk, the supervisor waits this long before it continues.
_FULL_DISK_SECONDS = 5.0


@dataclass(kw_only=True)
class LocalJob:
    """One job of a submission.

    Attributes:
        process: the process of the job, if this supervisor has started it; None: the job waits, an earlier supervisor
            has started it, or another process works on its run.
        devices: GPUs that only this job uses, if this supervisor has started it.
    """

    submission: Submission
    index: int
    process: subprocess.Popen[bytes] | None = None
    devices: tuple[str, ...] = ()

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

    def state(self, sweep: Path) -> JobState:
        """The job's state, from the claim of its run, the run's newest attempt, and its result."""
        run, job_id = RunFolder(sweep / self.run), self.submission.job_id or self.submission.token
        made_by = run.job() or {}
        has_begun = (made_by.get("token"), made_by.get("index")) == self.key
        try:
            result = run.result()
        except ConfigError:
            # The table reports the damaged file. This job does not start.
            return JobState(state="ended", raw="ended", job_id=job_id)
        is_over = result is not None and (result.kind is OutcomeKind.DONE or result.ended >= self.submission.created)
        is_open = has_begun and result is None
        if run.is_claimed() or (is_open and may_work(run.known_status(), silent_seconds=_SILENT_SECONDS)):
            state = "running"
        else:
            state = "ended" if has_begun or is_over or not run.path.is_dir() else "pending"
        if not has_begun:
            return JobState(state=state, raw=None if state == "pending" else state, job_id=job_id)
        end = time.time() if state == "running" or result is None else result.ended
        started, nodes = made_by.get("started"), made_by.get("nodes")
        return JobState(
            state=state,
            raw=state,
            elapsed_seconds=max(0.0, end - started) if isinstance(started, int | float) else None,
            nodes=tuple(map(str, nodes)) if isinstance(nodes, list) else (),
            job_id=job_id,
        )


def jobs_in_order(sweep: Path) -> list[LocalJob]:
    """The sweep's jobs of this launcher in the order in which they should start.

    The oldest batch comes first; within a batch, `Submission.places` gives the order.
    """
    batches: dict[str, int] = {}
    jobs: dict[tuple[int, int, int], LocalJob] = {}
    for submission in submissions(sweep):
        if submission.launcher == KIND:
            batch = batches.setdefault(submission.batch or submission.token, len(batches))
            places = submission.places or range(len(submission.runs))
            for index, place in enumerate(places):
                jobs[batch, place, len(jobs)] = LocalJob(submission=submission, index=index)
    return [jobs[key] for key in sorted(jobs)]


class LocalLauncher(Launcher):
    """Processes on this host."""

    def submit(self, sweep: Path, submission: Submission) -> str:
        # The submission's file is the queue, which the supervisor reads.
        return submission.token

    def find(self, sweep: Path, submission: Submission) -> str | None:
        return submission.token

    def states(self, sweep: Path, submitted: Sequence[Submission]) -> dict[JobKey, JobState]:
        states, idle = {}, why_idle(sweep)
        for submission in submitted:
            for index in range(len(submission.runs)):
                job = LocalJob(submission=submission, index=index)
                state = job.state(sweep)
                states[job.key] = replace(state, reason=idle) if state.state == "pending" else state
        return states

    def cancel(
        self, sweep: Path, jobs: Sequence[tuple[Submission, int]], report: Callable[[str], None], *, is_gentle: bool
    ) -> None:
        # A waiting job needs no signal: the process that cancels it writes its result, so that it does not start.
        for submission, index in jobs:
            name = submission.runs[index]
            if (host := signal_run(RunFolder(sweep / name), signal.SIGINT)) is not None:
                report(f"{name} runs on {host}: cancel it there")

    def wake(self, sweep: Path) -> bool:
        return wake(sweep)

    def place_in(self, environ: Mapping[str, str]) -> ProcessPlace:
        job, ranks = str(os.getpid()), replace(ALONE, started_by=KIND)
        return ProcessPlace(launcher=KIND, job_id=job, raw_job_id=job, ranks=ranks, nodes=(socket.gethostname(),))


def wake(sweep: Path) -> bool:
    """Start the sweep's supervisor if a job waits and no supervisor runs. Returns whether it was started.

    A running supervisor reads new submissions: before it ends, it claims the sweep and looks for them once more. If a
    new supervisor cannot run, because its interpreter is missing or the snapshot of the code is damaged, the jobs that
    wait fail.
    """
    if is_claimed(sweep, file=LOCK):
        return False
    waiting = [job for job in jobs_in_order(sweep) if job.state(sweep).state == "pending"]
    if not waiting:
        return False
    jobs_folder(sweep).mkdir(exist_ok=True)
    log = jobs_folder(sweep) / LOG
    begin = log.stat().st_size if log.exists() else 0
    command = [sys.executable, "-P", "-m", "titanlab.launch.local", str(sweep.absolute())]
    newest = max((job.submission for job in waiting), key=lambda submission: submission.created)
    # The shell ends at once, so that the supervisor has no parent that waits for it, and no terminal.
    shell = subprocess.run(
        ["sh", "-c", 'exec "$@" < /dev/null >> "$0" 2>&1 & echo $!', str(log), *command],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=_environment(sweep, newest),
    )
    pid, end = int(shell.stdout), time.monotonic() + _START_SECONDS
    while born_at(pid) is not None and time.monotonic() < end:
        if holder_of(sweep, file=LOCK) == (socket.gethostname(), pid):
            return True
        time.sleep(_START_POLL_SECONDS)
    # There is no error if the supervisor has finished already, or if another one holds the lock.
    if not is_claimed(sweep, file=LOCK) and (error := last_error(sweep, begin=begin)) is not None:
        for job in waiting:
            fail(sweep, job, f"could not be started: the sweep's supervisor has ended; {LOG} ends with: {error}")
    return True


def _environment(sweep: Path, submission: Submission) -> dict[str, str]:
    """The environment of a process that runs a submission's code; the code precedes the user's own modules."""
    own = submission.environment(sweep)
    # Python must not find snapshots of other submissions of this sweep.
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in inherited if path and not path.startswith(str(sweep / "code") + os.sep)]
    kept = {name: value for name, value in os.environ.items() if name not in MEETING}
    return {**kept, **own, "PYTHONPATH": os.pathsep.join([own["PYTHONPATH"], *others])}


def why_idle(sweep: Path) -> str | None:
    """Why the jobs that wait do not start, in one line; None: they will start, or the reason is not known."""
    holder = holder_of(sweep, file=LOCK)
    if holder is None or holder[0] != socket.gethostname():
        return None
    if is_claimed(sweep, file=LOCK):
        note = stopped_note(holder[1])
        return f"its supervisor, process {holder[1]}, {note}" if note else None
    error = last_error(sweep)
    return "its supervisor has ended" if error is None else f"its supervisor has ended: {error}"


def last_error(sweep: Path, *, begin: int = 0) -> str | None:
    """The error with which the supervisor's log ends; None: the log ends with an ordinary line.

    Args:
        begin: skip lines before this byte.
    """
    *_, last = [None, *printed_lines(jobs_folder(sweep) / LOG, begin=begin)]
    return None if last is None or _OWN_LINE.match(last) else last


def fail(sweep: Path, job: LocalJob, cause: str) -> None:
    """Write the result of a job that has ended before its run began, unless another process has claimed the run."""
    # Imported here: verbs that only ask for a launcher need no checkpoints.
    from titanlab.launch.attempt import with_progress

    run = RunFolder(sweep / job.run)
    with contextlib.suppress(ConfigError), run.claim():
        run.write_result(with_progress(run, Outcome(kind=OutcomeKind.CRASH, attempt=0, cause=cause)))


class Supervisor:
    """Runs the jobs of one sweep on this host."""

    def __init__(self, sweep: Path, *, devices: Sequence[str] | None = None) -> None:
        self._sweep = sweep
        self._devices = tuple(visible_devices(os.environ) if devices is None else devices)
        self._running: dict[tuple[str, int], LocalJob] = {}
        self._waiting: list[LocalJob] = []
        self._seen: set[str] = set()
        self._ending = False

    def run(self, lock: contextlib.ExitStack) -> None:
        """Run jobs until all have ended; then release the lock."""
        while self._running or not self._ending:
            try:
                self._collect()
                self._read_submissions()
                if self._waiting and not self._ending and self._has_room(self._waiting[0]):
                    self._start(self._waiting[0])
                    continue
            except OSError as error:
                # Running jobs go on, and no other job is started until there is space.
                fault = disk_fault(error)
                if fault is None:
                    raise
                _say(fault)
                time.sleep(_FULL_DISK_SECONDS)
                continue
            if self._waiting or self._running:
                time.sleep(_POLL_SECONDS)
            else:
                # While this process holds the claim, no other process can submit a job that nobody would run.
                with contextlib.suppress(ConfigError), claim_sweep(self._sweep):
                    self._read_submissions()
                    if not self._waiting and not self._running:
                        lock.close()
                        _say("all jobs have ended")
                        return
        _say("told to end; what waits stays in the queue")

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: ask all jobs to save and end, and start no more."""
        self._ending = True
        for job in self._running.values():
            if job.process is not None and job.process.poll() is None:
                job.process.send_signal(signal.SIGTERM)
            else:
                signal_run(RunFolder(self._sweep / job.run), signal.SIGTERM)

    def _read_submissions(self) -> None:
        """Read new submissions: collect the jobs that wait, in order, and watch those that run already."""
        tokens = {path.stem for path in (self._sweep / "submissions").glob("*.json")}
        if tokens == self._seen:
            return
        self._seen, self._waiting = tokens, []
        for job in jobs_in_order(self._sweep):
            state = "" if job.key in self._running else job.state(self._sweep).state
            if state == "pending":
                self._waiting.append(job)
            elif state == "running":
                self._watch(job)

    def _watch(self, job: LocalJob) -> None:
        _say(f"{job.run} was started by an earlier supervisor, or by another process")
        job.devices = ()
        self._running[job.key] = job

    def _collect(self) -> None:
        """Remove the jobs that have ended; write a result for each that has not begun an attempt."""
        for key, job in list(self._running.items()):
            if job.process is not None and job.process.poll() is None:
                continue
            state = job.state(self._sweep).state
            if state == "running":
                continue
            del self._running[key]
            if job.process is None and state == "pending":
                self._waiting.insert(0, job)
                continue
            if job.process is not None and state == "pending":
                cause = f"ended with exit code {job.process.returncode} before the run began"
                fail(self._sweep, job, early_end(self._logs(job)) or cause)
            _say(f"{job.run} has ended")

    def _has_room(self, job: LocalJob) -> bool:
        """Whether a job fits beside the running ones; a job that is larger than the limit runs alone."""
        used = sum(running.processes for running in self._running.values())
        gpus = min(job.submission.shape.gpus_per_node, len(self._devices))
        return (used == 0 or used + job.processes <= job.room) and gpus <= len(self._free_devices())

    def _free_devices(self) -> list[str]:
        taken: set[str] = set()
        for job in self._running.values():
            taken |= set(job.devices)
            if job.process is None and self._devices:
                environment = (RunFolder(self._sweep / job.run).env() or {}).get("environment", {})
                taken |= set(str(environment.get(DEVICES, "")).split(","))
        return [device for device in self._devices if device not in taken]

    def _start(self, job: LocalJob) -> None:
        """Start the first job that waits, unless it was cancelled, or another process works on its run."""
        job.devices = tuple(self._free_devices()[: job.submission.shape.gpus_per_node])
        try:
            # `titanlab cancel` claims the sweep too, so that it cannot cancel a job that is being started.
            with claim_sweep(self._sweep, patience_seconds=_PATIENCE_SECONDS):
                state = job.state(self._sweep).state
                if state == "pending":
                    job.process = self._started(job)
        except ConfigError:
            return  # Another process has claimed the sweep: try again at the next poll.
        except OSError as error:
            if disk_fault(error) is not None:
                raise
            # Do not retry: the next start would fail too. The supervisor goes on.
            state = "ended"
            fail(self._sweep, job, f"could not be started: {first_line(error)}")
        self._waiting.remove(job)
        if job.process is not None:
            self._running[job.key] = job
            _say(f"{job.run} is started: {counted(job.processes, 'rank')}, process {job.process.pid}")
        elif state == "running":
            self._watch(job)

    def _started(self, job: LocalJob) -> subprocess.Popen[bytes]:
        """Start the process of a job, which starts the ranks."""
        submission, folder = job.submission, Path(job.submission.folder)
        # Every process of a sweep gets the same share of the cores, so that layouts can be compared.
        share = max(1, cores() // max(job.room, job.processes))
        output, errors = self._logs(job)
        with output.open("ab") as out, errors.open("ab") as err:
            return subprocess.Popen(
                [sys.executable, *submission.command(self._sweep, job.index)],
                env={**_environment(self._sweep, submission), CORES: str(share), DEVICES: ",".join(job.devices)},
                # Relative paths in a recipe are relative to the folder in which it was submitted.
                cwd=folder if folder.is_dir() else None,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _logs(self, job: LocalJob) -> tuple[Path, Path]:
        name = f"{job.submission.token}_{job.index}_0_log"
        return jobs_folder(self._sweep) / f"{name}.out", jobs_folder(self._sweep) / f"{name}.err"


def signal_run(run: RunFolder, number: int) -> str | None:
    """Send a signal to the process that has claimed a run. Returns its host if that is another host, else None."""
    holder = holder_of(run.path)
    if holder is None or not run.is_claimed():
        return None
    host, pid = holder
    if host != socket.gethostname():
        return host
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return None


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
        # The shell has started this process with SIGINT ignored. With a handler here, the jobs do not ignore SIGINT.
        with handled_signals((signal.SIGTERM, signal.SIGINT), supervisor.end):
            supervisor.run(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
