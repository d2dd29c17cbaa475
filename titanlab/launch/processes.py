"""Ranks as processes of this host: started, watched, and ended together. This process does not import torch.

A stop request is forwarded to the ranks, which save and end. If the ranks do not end, or one is stopped (SIGSTOP),
their launcher kills all of them after a grace time and notes why. All launchers ask the same `Escalation` while they
wait.
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
from collections.abc import Callable, Iterator, Mapping
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
    STOP_SIGNALS,
    STOPS,
    Ranks,
    await_notes,
    caught_signals,
    free_port,
    handled_signals,
    hangs_of_others,
    stopped_before_start,
)
from titanlab.errors import ConfigError
from titanlab.launch.contract import Failure
from titanlab.launch.launchers import given_cores
from titanlab.launch.launchers_schema import Local
from titanlab.launch.rank.fork import adopting
from titanlab.records import Outcome, OutcomeKind, RunFolder
from titanlab.system import STOPPED, Console, module_command, process_state

# A rank that is stopped for this time is reported, and is killed if the run was asked to stop.
STOPPED_SECONDS = 5.0
# After a second request: enough to write notes.
HURRY_SECONDS = 5.0
# After a request before the first step: there is nothing to save.
START_SECONDS = 10.0
# After a request, without a new step or state in status.json: a step and a save take less.
STOP_SECONDS = 600.0
_ESCALATION_SECONDS = 0.5


class Escalation:
    """Watches ranks of this host during one attempt.

    Args:
        world: number of ranks of the run; those on other hosts count too.

    Attributes:
        is_over: whether the ranks must be killed: `is_due` has returned true.
        hangs: whether a rank keeps others waiting because it is stopped.
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
        self._answer_due = False
        self._stopped_since: dict[int, float] = {}
        self._said: set[int] = set()
        self.hangs = self.is_over = False
        self._looked_at = -float("inf")

    def asked(self, kind: OutcomeKind, cause: str) -> None:
        """Note a stop request; a second one, over a second later, means that the user does not want to wait."""
        now = self._clock()
        if self._asked is None:
            self._asked, self._asked_at, self._effect_at = (kind, cause), now, now
        elif not self._hurried_at and now - self._asked_at > ONE_REQUEST_SECONDS:
            self._hurried_at = now

    def signalled(self, number: int) -> None:
        """Note a signal to this process as a stop request."""
        # A closed terminal ends a run as Ctrl-C does.
        kind = STOPS[signal.SIGINT if number == signal.SIGHUP else number]
        self._answer_due = self._asked is None and number in (signal.SIGINT, signal.SIGTERM)
        self.asked(kind, f"asked to end by {signal.Signals(number).name}")

    def is_due(self, pids: Mapping[int, int]) -> bool:
        """Whether all ranks must be killed now, because a stop request has no effect; then a note says why.

        If a rank keeps the others waiting because it is stopped, a note says that it hangs.

        Args:
            pids: process by rank, for the ranks of this host that have not ended.
        """
        if self._answer_due:
            self._answer()
        if self._clock() - self._looked_at < _ESCALATION_SECONDS:
            return False
        self._looked_at = self._clock()
        stopped = self._look_for_stopped(pids)
        if self._asked is None:
            self._note_hang(stopped)
            return False
        why = self._why(stopped)
        if why is None:
            return False
        self.is_over = True
        kind, cause = self._asked
        rank = min(stopped or pids, default=0)
        self._note(kind, rank, f"{cause}; {why}, so all ranks were killed{self._lost()}")
        return True

    def _answer(self) -> None:
        """Tell the person at the terminal what the request will do; not called in the signal's handler."""
        self._answer_due = False
        state = self._state()[0]
        if state in ("running", "saving"):
            what = "stopping after this step, then saving" if state == "running" else "stopping when this is saved"
            self._say(f"{what}. A second Ctrl-C ends the run now{self._lost()}")

    def _look_for_stopped(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Ranks that have been stopped for a while, with the states of their processes."""
        states = {rank: state for rank, pid in pids.items() if (state := process_state(pid)) in STOPPED}
        now = self._clock()
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in states}
        long = {rank: states[rank] for rank, since in self._stopped_since.items() if now - since >= STOPPED_SECONDS}
        for rank in long.keys() - self._said:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - now + self._stopped_since[rank]))
            waits = ", and the others wait for it" if self._world > 1 else ""
            command = f"`kill -CONT {pids[rank]}` on {socket.gethostname()}"
            resume = f": {command} lets it go on" if states[rank] == "T" else ""
            words = f"rank {rank}: {STATES[states[rank]]} since {since}{waits}{resume}"
            self._say(words)
            self._keep_stopped(rank, words)
        for rank in self._said - long.keys():
            self._keep_stopped(rank, None)
        self._said = set(long)
        return long

    def _keep_stopped(self, rank: int, words: str | None) -> None:
        # `status` and `diagnose` show it, perhaps on another host. A full disk must not end the watch.
        with contextlib.suppress(OSError):
            self._run.keep_stopped(self._number(), rank, words)

    def _note_hang(self, stopped: Mapping[int, str]) -> None:
        """Note that a rank hangs if it keeps others waiting for as long as a step may take."""
        limit = self._limit()
        if self.hangs or self._world == 1 or limit is None:
            return
        for rank, state in stopped.items():
            # State "t" is a debugger's: somebody is looking at the rank. In a step, the waiting ranks note the hang
            # first.
            if state == "T" and self._clock() - self._stopped_since[rank] >= limit + STOPPED_SECONDS:
                self.hangs = True
                what = f"a rank was stopped for {limit:g} s"
                self._note(OutcomeKind.HANG, rank, f"{what}: rank {rank} does not answer: {STATES[state]}")

    def _limit(self) -> float | None:
        """Seconds that a rank may be stopped; None: no limit."""
        with contextlib.suppress(ConfigError, AttributeError):
            limit = self._run.config(self._number()).get("training", {}).get("step_timeout_seconds")
            return LEAST_LIMIT_SECONDS if limit is None else float(limit) or None
        return LEAST_LIMIT_SECONDS

    def _why(self, stopped: Mapping[int, str]) -> str | None:
        """Why the ranks must be killed after a stop request, as a clause; None: not yet."""
        now, (state, step) = self._clock(), self._state()
        if (state, step) != self._progress:
            self._progress, self._effect_at = (state, step), now
        if stopped:
            rank = min(stopped)
            return f"rank {rank} did not end ({STATES[stopped[rank]]})"
        if self._hurried_at:
            return "asked again" if now - self._hurried_at >= HURRY_SECONDS else None
        limit = START_SECONDS if state in ("starting", "ended") else STOP_SECONDS
        return f"its ranks did not end within {limit:g} s" if now - self._effect_at >= limit else None

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
        # If the disk is full, the ranks are killed without a note.
        with contextlib.suppress(OSError):
            step = self._state()[1]
            self._run.write_failure(Outcome(kind=kind, rank=rank, step=step, attempt=self._number(), cause=cause))


_POLL_SECONDS = 0.05
# Seconds between two looks for notes of ranks that hang.
_HANG_LOOK_SECONDS = 0.5
# A process in state D (it waits for a device) does not end at SIGKILL.
KILL_SECONDS = 30.0


class RankProcesses:
    """Child processes of this process, each the leader of a session, by rank.

    Args:
        started: those that this process has started itself; the others were adopted.
    """

    def __init__(self, pids: Mapping[int, int], started: Mapping[int, subprocess.Popen[bytes]] | None = None) -> None:
        self.pids = dict(pids)
        self.started = dict(started or {})
        self._codes: dict[int, int] = {}

    def running(self) -> dict[int, int]:
        """The processes that have not ended; reaps the others."""
        for rank in self.pids.keys() - self._codes.keys():
            try:
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            except ChildProcessError:
                # No exit code is kept if SIGCHLD is ignored: some programs start this one in that state.
                pid, status = self.pids[rank], 0
            if pid:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
                if self._codes[rank]:
                    # End the processes that the rank has started. While one of them lives, no other process gets this
                    # group's number.
                    with contextlib.suppress(OSError):
                        os.killpg(pid, signal.SIGKILL)
                if rank in self.started:
                    self.started[rank].returncode = self._codes[rank]
        return {rank: pid for rank, pid in self.pids.items() if rank not in self._codes}

    @property
    def codes(self) -> dict[int, int]:
        """Exit code of each rank that has ended, by rank; -N for signal N."""
        self.running()
        return dict(sorted(self._codes.items()))

    def ask_to_stop(self, number: int) -> None:
        """Send a signal to every rank that has not ended; wake stopped ranks, which would not receive it."""
        for pid in self.running().values():
            _ask_to_stop(pid, number)

    def show_stacks(self) -> None:
        """Make ranks write the Python stacks of all their threads to their logs; does not wake stopped ranks."""
        for pid in self.running().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def wait_for_failure(self, hangs: Callable[[], bool], is_due: Callable[[], bool]) -> tuple[set[int], set[int]]:
        """Wait until a rank fails, ranks hang or must be killed, or all ranks have ended well.

        Returns:
            the ranks that failed, and those that ended with exit code 0.
        """
        look = time.monotonic() + _HANG_LOOK_SECONDS
        while self.running() and not any(self._codes.values()) and not is_due():
            if time.monotonic() > look:
                if hangs():
                    break
                look = time.monotonic() + _HANG_LOOK_SECONDS
            time.sleep(_POLL_SECONDS)
        failed = {rank for rank, code in self._codes.items() if code}
        return failed, self._codes.keys() - failed

    def end(self, number: int, *, seconds: float) -> None:
        """End all ranks, with the processes that they have started: by a signal, and by SIGKILL some seconds later."""
        for send, limit in ((number, seconds), (signal.SIGKILL, KILL_SECONDS)):
            for pid in self.running().values():
                with contextlib.suppress(ProcessLookupError):
                    # A rank that has just been forked may not yet lead a group.
                    (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, send)
            self.wait(limit)

    def wait(self, seconds: float) -> None:
        """Wait until all have ended, but no longer than this."""
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)


def _ask_to_stop(pid: int, number: int) -> None:
    for each in (number, signal.SIGCONT):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, each)


# A rank that hangs ends by itself within this time after its note.
_LINGER_SECONDS = 6.0
# The other ranks have this time to end after one has failed.
GRACE_SECONDS = 5
# Seconds between two looks at the process that forks the ranks.
_LOOK_SECONDS = 0.2
_PIPE_BYTES = 65_536


def start(folder: Path, *, attempt: int, world: int, logs: Path) -> list[Failure]:
    """Run `titanlab.launch.rank FOLDER` as `world` ranks and wait until they end.

    Rank 0 writes to this terminal; the others write to `logs/rank-N.log`. SIGINT, SIGTERM and a scheduler's warnings
    are forwarded: the ranks agree on a step, save, and end.

    Returns:
        the ranks that failed, by rank. Their own records of the failure are in the run's folder.
    """
    first = replace(ALONE, world=world, local_world=world, port=free_port(), started_by=Local.kind)
    places = [replace(first, rank=rank, local_rank=rank) for rank in range(world)]
    return start_one(folder, places[0], attempt=attempt) if world == 1 else _start_many(folder, places, attempt, logs)


def start_one(
    folder: Path, ranks: Ranks, *, attempt: int | None = None, config: Mapping[str, Any] | None = None
) -> list[Failure]:
    """Run the worker as one given rank; its peers, if it has any, are started elsewhere.

    Args:
        attempt: None: the ranks agree on it.
        config: the recipe as plain values, for a rank that may start before rank 0 has written config.yaml.
    """
    begin, run = time.time(), RunFolder(folder)
    escalation = _escalation(run, attempt=attempt, ranks=ranks)
    with _forwarded_signals(escalation) as signals:
        started = start_worker(folder, ranks, attempt, config=config)
        signals.forward_to(started.ask_to_stop)
        return wait_for(started, run, since=begin, escalation=escalation, world=ranks.world)


def _escalation(run: RunFolder, *, attempt: int | None, ranks: Ranks) -> Escalation:
    # Rank 0 has the terminal.
    console = Console(quiet=ranks.rank > 0)
    return Escalation(run, attempt=attempt, world=ranks.world, say=console.note)


def _start_many(folder: Path, places: list[Ranks], attempt: int, logs: Path) -> list[Failure]:
    begin, run = time.time(), RunFolder(folder)
    escalation = _escalation(run, attempt=attempt, ranks=places[0])
    with _forwarded_signals(escalation) as signals:
        with adopting() as can_fork:
            if can_fork:
                started = _forked(run, places, attempt, signals, escalation)
            else:
                started = _one_by_one(folder, places, attempt, logs)
        if isinstance(started, Failure):
            return [started]
        signals.forward_to(started.ask_to_stop)
        return wait_for(started, run, since=begin, escalation=escalation)


def wait_for(
    started: RankProcesses,
    run: RunFolder,
    *,
    since: float,
    escalation: Escalation | None = None,
    world: int | None = None,
) -> list[Failure]:
    """Wait until the ranks of this host have ended, or end all after the failure of one. Returns those that failed.

    Args:
        world: number of ranks of the run; None: all of them were started here.
    """
    watch = escalation or Escalation(run, attempt=None, world=len(started.pids), say=Console().note)
    failed, left = started.wait_for_failure(
        lambda: bool(hangs_of_others(run, None, since=since)), lambda: watch.is_due(started.running())
    )
    hangs = bool(hangs_of_others(run, None, since=since))
    if watch.is_over:
        started.end(signal.SIGKILL, seconds=GRACE_SECONDS)
    elif failed or hangs:
        others = {rank: pid for rank, pid in started.pids.items() if rank not in failed | left}
        are_silent = await_notes(run, others, since=since, world=world)
        if hangs and not are_silent and world not in (None, len(started.pids)):
            # The exit code tells the launcher of other hosts' ranks that this rank hangs.
            started.wait(_LINGER_SECONDS)
        # Ranks that hang save nothing: they get no time to end.
        started.end(signal.SIGKILL if hangs else signal.SIGTERM, seconds=GRACE_SECONDS)
    codes = started.codes
    # Ranks that ended because of the first failure do not count.
    counted = failed or {rank for rank, code in codes.items() if code}
    if failed or hangs:
        counted |= left
    return [Failure(rank=rank, exit_code=code) for rank, code in codes.items() if rank in counted]


def _forked(
    run: RunFolder, places: list[Ranks], attempt: int, signals: _Signals, escalation: Escalation
) -> RankProcesses | Failure:
    """Start one process that forks the ranks and exits; this process becomes their parent (`rank/fork.py`)."""
    reading, writing = os.pipe()
    forking = subprocess.Popen(
        worker_command(run.path),
        env={
            **os.environ,
            **worker_environment(places[0], attempt),
            PIDS_FILE: str(writing),
        },
        pass_fds=(writing,),
        start_new_session=True,
    )
    os.close(writing)
    text = b""
    with os.fdopen(reading, "rb", buffering=0) as file:
        while True:
            # A signal ends the wait early.
            if select.select([file], [], [], _LOOK_SECONDS)[0]:
                part = file.read(_PIPE_BYTES)
                if not part:
                    break
                text += part
            if signals.waiting:
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
        if code == -signal.SIGTERM and signals.waiting:
            run.write_failure(stopped_before_start(signals.waiting[0], attempt=attempt))
        return Failure(rank=0, exit_code=code)
    return RankProcesses({int(rank): pid for rank, pid in json.loads(text).items()})


def _one_by_one(folder: Path, places: list[Ranks], attempt: int, logs: Path) -> RankProcesses:
    processes: dict[int, subprocess.Popen[bytes]] = {}
    for place in places:
        log = {LOG: str(logs / f"rank-{place.rank}.log")} if place.rank else {}
        processes |= start_worker(folder, place, attempt, variables=log).started
    return RankProcesses({rank: process.pid for rank, process in processes.items()}, processes)


def start_worker(
    folder: Path,
    ranks: Ranks,
    attempt: int | None,
    *,
    config: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    set_up: Callable[[], None] | None = None,
) -> RankProcesses:
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
        # A worker that has ended already is found by its exit code.
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(json.dumps(config).encode() + b"\n")
    return RankProcesses({ranks.rank: child.pid}, {ranks.rank: child})


def worker_command(folder: Path) -> list[str]:
    """The command that starts one rank."""
    return [*module_command("titanlab.launch.rank"), str(folder)]


def worker_environment(ranks: Ranks, attempt: int | None = None) -> dict[str, str]:
    """Environment variables of a rank that this process starts; without an attempt, the ranks agree on it."""
    own = {PARENT: str(os.getpid())} if attempt is None else {PARENT: str(os.getpid()), ATTEMPT: str(attempt)}
    return ranks.environment() | own


class _Signals:
    """Forwards stop signals to the ranks; keeps signals that arrive before the ranks exist.

    Attributes:
        waiting: signals that were not forwarded yet.
    """

    def __init__(self, escalation: Escalation) -> None:
        self._escalation = escalation
        self.waiting: list[int] = []
        self._send: Callable[[int], None] | None = None
        self._numbers = caught_signals()
        self.catch()

    def catch(self) -> None:
        for number in (*STOP_SIGNALS, signal.SIGHUP):
            # torch's agent handles SIGHUP even under `nohup`.
            signal.signal(number, self._handler if number in self._numbers else signal.SIG_IGN)

    def forward_to(self, send: Callable[[int], None]) -> None:
        """Set the receiver, and send it the waiting signals."""
        self._send = send
        self.catch()
        while self.waiting:
            send(self.waiting.pop(0))

    def _handler(self, number: int, frame: FrameType | None) -> None:
        self._escalation.signalled(number)
        if self._send is None:
            self.waiting.append(number)
        else:
            self._send(number)


@contextlib.contextmanager
def _forwarded_signals(escalation: Escalation) -> Iterator[_Signals]:
    """Forward stop signals instead of dying of them; afterwards restore all handlers."""
    with handled_signals((*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)):
        yield _Signals(escalation)
