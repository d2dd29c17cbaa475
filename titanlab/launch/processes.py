"""Ranks as processes of this host: started, watched, and ended together. This process does not import torch.

A stop request is forwarded to the ranks, which save and end. If the ranks do not end, or one is stopped (SIGSTOP),
their launcher kills all of them after a grace time and notes why. Every launcher waits in `RankProcesses.watch`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from titanlab.distributed import (
    ALONE,
    ATTEMPT,
    LEAST_LIMIT_SECONDS,
    LOG,
    ONE_REQUEST_SECONDS,
    PARENT,
    PIDS_FILE,
    STATES,
    STOPS,
    Ranks,
    await_notes,
    caught_signals,
    free_port,
    handled_signals,
    hangs_of_others,
    stopped_before_start,
    this_host,
)
from titanlab.errors import ConfigError
from titanlab.launch.launchers import given_cores
from titanlab.launch.launchers_schema import Local
from titanlab.launch.rank.fork import adopting
from titanlab.records import Outcome, OutcomeKind, RunFolder
from titanlab.system import STOPPED, Console, module_command, process_state

# A rank that SIGSTOP or a debugger stops for this time is reported; it is killed if the run was asked to stop.
STOPPED_SECONDS = 5.0
# After a second stop request, the ranks have this time to write records of failures and to end.
HURRY_SECONDS = 5.0
# After a stop request before the first step, the ranks have this time to end: there is nothing to save.
START_SECONDS = 10.0
# The longest time after a stop request without a new step or state in status.json: a step or a save takes less.
STOP_SECONDS = 600.0
_ESCALATION_SECONDS = 0.5


class Escalation:
    """Decides when ranks of this host must be killed, because a request to stop has no effect; records ranks that hang.

    Args:
        world: number of ranks of the run, including those on other hosts.

    Attributes:
        signals: the signals that this process has got.
        unsent: those of the signals that were not yet sent to the ranks.
        is_over: whether the ranks must be killed: `is_due` has returned true.
        hangs: whether a stopped rank (SIGSTOP) has kept the others waiting for longer than a step may take.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        attempt: int | None,
        world: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._attempt, self._world, self._say, self._clock = run, attempt, world, say, clock
        self._asked: tuple[OutcomeKind, str] | None = None
        self._asked_at = self._effect_at = self._hurried_at = 0.0
        self._progress: tuple[str, int] | None = None
        self._answer_due = self.hangs = self.is_over = False
        # The ranks that are stopped, with the time when this was first seen; and those of them that were reported.
        self._stopped_since: dict[int, float] = {}
        self._said: set[int] = set()
        self._looked_at = -float("inf")
        self.signals: list[int] = []
        self.unsent: list[int] = []

    def asked(self, kind: OutcomeKind, cause: str) -> None:
        """Note a stop request. A second request, over a second later, means that the user does not want to wait."""
        now = self._clock()
        if self._asked is None:
            self._asked, self._asked_at, self._effect_at = (kind, cause), now, now
        elif not self._hurried_at and now - self._asked_at > ONE_REQUEST_SECONDS:
            self._hurried_at = now

    def signalled(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal to this process as a stop request."""
        # SIGHUP, the signal of a closed terminal, ends a run as Ctrl-C does.
        kind = STOPS[signal.SIGINT if number == signal.SIGHUP else number]
        self._answer_due = self._asked is None and number in (signal.SIGINT, signal.SIGTERM)
        self.asked(kind, f"asked to end by {signal.Signals(number).name}")
        self.signals.append(number)
        self.unsent.append(number)

    def is_due(self, pids: Mapping[int, int]) -> bool:
        """Whether all ranks must be killed now; if so, writes a record that says why.

        Args:
            pids: process numbers by rank, of the ranks of this host that have not ended.
        """
        now = self._clock()
        if self._answer_due:
            # Answer the user here, because a signal's handler must not print.
            self._answer_due = False
            state, _ = self._state()
            if state in ("running", "saving"):
                what = "stopping after this step, then saving" if state == "running" else "stopping when this is saved"
                self._say(f"{what}. A second Ctrl-C ends the run now{self._lost()}")
        if now - self._looked_at < _ESCALATION_SECONDS:
            return False
        self._looked_at = now
        stopped = self._look_for_stopped(pids, now)
        if self._asked is None:
            self._note_hang(stopped, now)
            return False
        state, step = self._state()
        if (state, step) != self._progress:
            self._progress, self._effect_at = (state, step), now
        limit = START_SECONDS if state in ("starting", "ended") else STOP_SECONDS
        if stopped:
            rank = min(stopped)
            why = f"rank {rank} did not end ({STATES[stopped[rank]]})"
        elif self._hurried_at:
            if now - self._hurried_at < HURRY_SECONDS:
                return False
            why = "asked again"
        elif now - self._effect_at >= limit:
            why = f"its ranks did not end within {limit:g} s"
        else:
            return False
        self.is_over = True
        kind, cause = self._asked
        self._note(kind, min(stopped or pids, default=0), f"{cause}; {why}, so all ranks were killed{self._lost()}")
        return True

    def _look_for_stopped(self, pids: Mapping[int, int], now: float) -> dict[int, str]:
        """States of the processes that have been stopped for a while, by rank; reports each such rank once."""
        states = {rank: state for rank, pid in pids.items() if (state := process_state(pid)) in STOPPED}
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in states}
        long = {rank: states[rank] for rank, since in self._stopped_since.items() if now - since >= STOPPED_SECONDS}
        for rank in self._said ^ long.keys():
            words = None
            if rank in long:
                since = time.strftime("%H:%M:%S", time.localtime(time.time() - now + self._stopped_since[rank]))
                waits = ", and the others wait for it" if self._world > 1 else ""
                command = f"`kill -CONT {pids[rank]}` on {socket.gethostname()}"
                resume = f": {command} lets it go on" if states[rank] == "T" else ""
                words = f"rank {rank}: {STATES[states[rank]]} since {since}{waits}{resume}"
                self._say(words)
            # `titanlab status` and `diagnose` read these words, perhaps on another host. Go on if the disk is full.
            with contextlib.suppress(OSError):
                self._run.keep_stopped(self._number(), rank, words)
        self._said = set(long)
        return long

    def _note_hang(self, stopped: Mapping[int, str], now: float) -> None:
        """Record that a rank hangs if it keeps others waiting for as long as a step may take."""
        # State "t" is a debugger's: somebody is looking at the rank.
        ranks = [rank for rank, state in stopped.items() if state == "T"]
        if self.hangs or self._world == 1 or not ranks:
            return
        limit: float | None = LEAST_LIMIT_SECONDS
        with contextlib.suppress(ConfigError, AttributeError):
            given = self._run.config(self._number()).get("training", {}).get("step_timeout_seconds")
            # step_timeout_seconds=0 means no limit.
            limit = LEAST_LIMIT_SECONDS if given is None else float(given) or None
        for rank in ranks:
            # Wait longer than the limit: in a step, the ranks that wait then record the hang before this process does.
            if limit is not None and now - self._stopped_since[rank] >= limit + STOPPED_SECONDS:
                self.hangs = True
                what = f"a rank was stopped for {limit:g} s"
                self._note(OutcomeKind.HANG, rank, f"{what}: rank {rank} does not answer: {STATES['T']}")

    def _state(self) -> tuple[str, int]:
        """State and step of this attempt, as status.json has them."""
        status = self._run.known_status()
        return ("starting", 0) if status is None or status.attempt != self._number() else (status.state, status.step)

    def _lost(self) -> str:
        lost = self._run.lost_steps()
        return f"; {lost}" if lost else ""

    def _number(self) -> int:
        return self._attempt or self._run.newest_attempt()

    def _note(self, kind: OutcomeKind, rank: int, cause: str) -> None:
        # If the disk is full, the ranks are killed without a record.
        with contextlib.suppress(OSError):
            step = self._state()[1]
            self._run.write_failure(Outcome(kind=kind, rank=rank, step=step, attempt=self._number(), cause=cause))


_POLL_SECONDS = 0.05
# The longest wait after SIGKILL: a process in state D (it waits for a device) does not end.
KILL_SECONDS = 30.0


class RankProcesses:
    """Ranks that are children of this process, each the leader of a session. An adopted child is given by its pid."""

    def __init__(self, processes: Mapping[int, int | subprocess.Popen[bytes]]) -> None:
        self.pids = {rank: each if isinstance(each, int) else each.pid for rank, each in processes.items()}
        self._processes = processes
        self._codes: dict[int, int] = {}

    def running(self) -> dict[int, int]:
        """Process numbers of the ranks that have not ended, by rank; reaps the ranks that have ended."""
        for rank in self.pids.keys() - self._codes.keys():
            try:
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            except ChildProcessError:
                # If SIGCHLD is ignored, the kernel keeps no exit code. The parent may have started this process so.
                pid, status = self.pids[rank], 0
            if pid:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
                if self._codes[rank]:
                    # End the processes that the rank has started. While one of them lives, no other process gets this
                    # group's number.
                    with contextlib.suppress(OSError):
                        os.killpg(pid, signal.SIGKILL)
                if not isinstance(process := self._processes[rank], int):
                    process.returncode = self._codes[rank]
        return {rank: pid for rank, pid in self.pids.items() if rank not in self._codes}

    @property
    def codes(self) -> dict[int, int]:
        """Exit code of each rank that has ended, by rank; -N for signal N."""
        self.running()
        return dict(sorted(self._codes.items()))

    def watch(self, escalation: Escalation, look: Callable[[], float | None], *, seconds: float) -> None:
        """Wait until all ranks have ended with exit code 0, one has failed, or the remaining ranks must be ended.

        Args:
            look: called every `seconds`; returns how many seconds the ranks may still run, None for any time. The
                earliest end counts.
        """
        end, look_at = float("inf"), time.monotonic()
        while (running := self.running()) and not any(self._codes.values()):
            while escalation.unsent:
                self.ask_to_stop(escalation.unsent.pop(0))
            if time.monotonic() >= look_at:
                limit = look()
                look_at = time.monotonic() + seconds
                end = min(end, look_at - seconds + limit) if limit is not None else end
            if escalation.is_due(running) or time.monotonic() >= end:
                return
            time.sleep(_POLL_SECONDS)

    def ask_to_stop(self, number: int) -> None:
        """Send a signal to every rank that has not ended; wake stopped ranks, which would not receive it."""
        for pid in self.running().values():
            _ask_to_stop(pid, number)

    def end(self, number: int, *, seconds: float) -> None:
        """End all ranks and the processes that they started: by signal `number`, and after `seconds` by SIGKILL."""
        for send, limit in ((number, seconds), (signal.SIGKILL, KILL_SECONDS)):
            for pid in self.running().values():
                with contextlib.suppress(ProcessLookupError):
                    # A rank that has just been forked may not yet lead a group.
                    (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, send)
            self.wait(limit)

    def wait(self, seconds: float) -> None:
        """Wait until all ranks have ended, at most for `seconds`."""
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)


def _ask_to_stop(pid: int, number: int) -> None:
    for each in (number, signal.SIGCONT):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, each)


# A rank that hangs ends by itself within this time after it has recorded the hang.
_LINGER_SECONDS = 6.0
# After one rank has failed, the other ranks have this time to end.
GRACE_SECONDS = 5
# Seconds between two looks for records of ranks that hang.
_HANG_LOOK_SECONDS = 0.5
# Seconds between two looks at the process that forks the ranks.
_LOOK_SECONDS = 0.2
_PIPE_BYTES = 65_536


def of_this_host(world: int) -> Ranks:
    """The `Ranks` of rank 0, for a run whose ranks are all on this host."""
    return replace(ALONE, world=world, local_world=world, port=free_port(), started_by=Local.kind)


def start(
    run: RunFolder, ranks: Ranks, *, attempt: int | None, config: Mapping[str, Any] | None = None
) -> dict[int, int]:
    """Run `titanlab.launch.rank FOLDER` as the rank of this process, or as all ranks, and wait until they end.

    Rank 0 writes to this terminal. If this process starts all ranks, the others write to `logs/rank-N.log`. SIGINT,
    SIGTERM and a scheduler's warnings are forwarded: the ranks agree on a step, save, and end. Then this process raises
    these signals for itself.

    Args:
        ranks: the rank of this process; for all ranks, the value of `of_this_host`.
        attempt: its number; None: the ranks agree on it.
        config: the recipe as plain values, for a rank that may start before rank 0 has written config.yaml.

    Returns:
        exit codes of the ranks that failed, by rank; -N for signal N. Their own records are in the run's folder.
    """
    begin = time.time()
    # Only rank 0 writes to the terminal.
    say = Console(quiet=ranks.rank > 0).note
    escalation = Escalation(run, attempt=attempt, world=ranks.world, say=say)
    with handled_signals(caught_signals(), escalation.signalled):
        started: RankProcesses | int
        if ranks.started_by != Local.kind or ranks.world == 1:
            started = RankProcesses({ranks.rank: start_worker(run.path, ranks, attempt, config=config)})
        else:
            with adopting() as can_fork:
                started = (_forked if can_fork else _each)(run, ranks, attempt, escalation)
        if isinstance(started, int):
            failed = {0: started}
        else:
            failed = wait_for(started, run, since=begin, escalation=escalation, world=ranks.world)
    # A signal that came while failed ranks were ended must end the run as well.
    for number in escalation.signals:
        signal.raise_signal(number)
    return failed


def wait_for(
    started: RankProcesses,
    run: RunFolder,
    *,
    since: float,
    escalation: Escalation | None = None,
    world: int | None = None,
) -> dict[int, int]:
    """Wait until the ranks of this host have ended, or end all after the failure of one.

    Returns the exit codes of the ranks that failed, by rank.

    Args:
        since: when the ranks were started, in seconds since the epoch; older notes of hangs are from earlier attempts.
        world: number of ranks of the run; None: all of them were started here.
    """

    def hang() -> bool:
        return bool(hangs_of_others(run, None, since=since))

    escalation = escalation or Escalation(run, attempt=None, world=len(started.pids), say=Console().note)
    started.watch(escalation, lambda: 0.0 if hang() else None, seconds=_HANG_LOOK_SECONDS)
    ended, hangs = started.codes, hang()
    failed = {rank for rank, code in ended.items() if code}
    if escalation.is_over:
        started.end(signal.SIGKILL, seconds=GRACE_SECONDS)
    elif failed or hangs:
        others = {rank: pid for rank, pid in started.pids.items() if rank not in ended}
        # If all ranks are on this host, wait only for those that still run: an ended rank will not write a note.
        elsewhere = None if world == len(started.pids) else world
        are_silent = await_notes(run, others, since=since, world=elsewhere)
        if hangs and not are_silent and elsewhere is not None:
            # A rank that hangs ends by itself: its exit code tells the launcher of other hosts' ranks that it hangs.
            started.wait(_LINGER_SECONDS)
        # Ranks that hang save nothing: they get no time to end.
        started.end(signal.SIGKILL if hangs else signal.SIGTERM, seconds=GRACE_SECONDS)
    codes = started.codes
    # Ranks that ended because of the first failure do not count.
    counted = failed or {rank for rank, code in codes.items() if code}
    if failed or hangs:
        # A rank that ended with exit code 0 before the failure or the hang does count.
        counted |= ended.keys() - failed
    return {rank: code for rank, code in codes.items() if rank in counted}


def _each(run: RunFolder, first: Ranks, attempt: int | None, escalation: Escalation) -> RankProcesses:
    """Start every rank as a process of its own, where this process cannot adopt forked ranks."""
    started = {}
    for rank in range(first.world):
        log = {LOG: str(run.logs / f"rank-{rank}.log")} if rank else {}
        started[rank] = start_worker(run.path, replace(first, rank=rank, local_rank=rank), attempt, variables=log)
    return RankProcesses(started)


def _forked(run: RunFolder, first: Ranks, attempt: int | None, escalation: Escalation) -> RankProcesses | int:
    """Start one process that forks the ranks and exits; this process becomes their parent (`rank/fork.py`).

    Returns the forking process's exit code if it has failed before the ranks were forked.
    """
    reading, writing = os.pipe()
    forking = subprocess.Popen(
        worker_command(run.path),
        env={**os.environ, **worker_environment(first, attempt), PIDS_FILE: str(writing)},
        pass_fds=(writing,),
        start_new_session=True,
    )
    os.close(writing)
    text = b""
    with os.fdopen(reading, "rb", buffering=0) as file:
        while True:
            if select.select([file], [], [], _LOOK_SECONDS)[0]:
                part = file.read(_PIPE_BYTES)
                if not part:
                    break
                text += part
            if escalation.unsent:
                # The forking process ends now if it has not begun to fork; otherwise its ranks get the signal.
                _ask_to_stop(forking.pid, signal.SIGTERM)
            if escalation.is_due({0: forking.pid}) or escalation.hangs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(forking.pid, signal.SIGKILL)
                break
    code = -signal.SIGKILL
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = forking.wait(KILL_SECONDS)
    if code or not text:
        if code == -signal.SIGTERM and escalation.unsent:
            run.write_failure(stopped_before_start(escalation.unsent[0], attempt=attempt or 0))
        return code
    return RankProcesses({int(rank): pid for rank, pid in json.loads(text).items()})


def start_worker(
    folder: Path,
    ranks: Ranks,
    attempt: int | None,
    *,
    config: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    set_up: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start the process of one rank, which leads a session.

    Args:
        config: the recipe as plain values, which the rank gets as the first line of its input; None: it has no input.
    """
    child = subprocess.Popen(
        [*worker_command(folder), *(["-"] if config else [])],
        env={
            **os.environ,
            **given_cores(ranks.started_by, os.environ),
            **worker_environment(ranks, attempt),
            **(variables or {}),
        },
        stdin=subprocess.PIPE if config else None,
        start_new_session=True,
        preexec_fn=set_up,
    )
    if child.stdin is not None:
        # If the worker has ended already, its exit code tells so later.
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(json.dumps(config).encode() + b"\n")
    return child


def worker_command(folder: Path) -> list[str]:
    return [*module_command("titanlab.launch.rank"), str(folder)]


def worker_environment(ranks: Ranks, attempt: int | None = None) -> dict[str, str]:
    """Environment variables of a rank that this process starts; `attempt` None: the ranks agree on the attempt."""
    own = {PARENT: str(os.getpid())} if attempt is None else {PARENT: str(os.getpid()), ATTEMPT: str(attempt)}
    return ranks.environment() | own


DEVICES = "CUDA_VISIBLE_DEVICES"


def visible_devices(environ: Mapping[str, str]) -> list[str]:
    """The accelerators that this process may use, as in CUDA_VISIBLE_DEVICES."""
    host = this_host()
    if host.accelerator != "cuda":
        return []
    visible = [part.strip() for part in environ.get(DEVICES, "").split(",") if part.strip()]
    return visible[: host.count] if visible else [str(number) for number in range(host.count)]


def hide_device(rank: int) -> None:
    """Hide the device of a rank that was left out from the processes that this process starts from now on."""
    visible = visible_devices(os.environ)
    del visible[rank : rank + 1]
    os.environ[DEVICES] = ",".join(visible)
