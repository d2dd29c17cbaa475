"""Ranks as processes of this host: started, watched, and ended together. This process does not import torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from titanlab.distributed.ranks import Ranks, free_port
from titanlab.distributed.silence import ANSWER_SECONDS, end_if_silent, hangs_of_others, note_silent_ranks
from titanlab.distributed.start_up import launched_at
from titanlab.distributed.stop import STOP_SIGNALS, caught_signals, handlers_kept, stopped_before_start
from titanlab.launch.contract import Failure
from titanlab.launch.escalation import Escalation
from titanlab.launch.launchers import given_cores
from titanlab.launch.local.rank_processes import KILL_SECONDS, RankProcesses, ask_to_stop
from titanlab.launch.local.wake import KIND
from titanlab.records.run_folder import RunFolder
from titanlab.system.processes import module_command
from titanlab.system.terminal import Console
from titanlab.worker.fork import LOGS, PIDS_FILE, adopting

# The other ranks have this time to end after one has failed.
GRACE_SECONDS = 5
# Between two looks at the process that forks the ranks.
_LOOK_SECONDS = 0.2
_PIPE_BYTES = 65_536


def start(folder: Path, *, attempt: int, world: int, logs: Path) -> list[Failure]:
    """Run `titanlab.worker FOLDER` as `world` ranks and wait until they end.

    Rank 0 writes to this terminal; the others write to `logs/rank-N.log`. SIGINT, SIGTERM and a scheduler's warnings
    are forwarded: the ranks agree on a step, save, and end.

    Returns:
        the ranks that failed, by rank. Their own records of the failure are in the run's folder.
    """
    port = free_port()
    places = [
        Ranks(
            rank=rank,
            world=world,
            local_rank=rank,
            local_world=world,
            address="127.0.0.1",
            port=port,
            started_by=KIND,
        )
        for rank in range(world)
    ]
    return start_one(folder, places[0], attempt=attempt) if world == 1 else _start_many(folder, places, attempt, logs)


def start_one(
    folder: Path, ranks: Ranks, *, attempt: int | None = None, config: Mapping[str, Any] | None = None
) -> list[Failure]:
    """Run the worker as one given rank; its peers, if it has any, are started elsewhere.

    Args:
        attempt: the number of the attempt, if every rank gets it; None: the ranks agree on it.
        config: the recipe as plain values, for a rank that may start before rank 0 has written the attempt's
            config.yaml.
    """
    begin, run = time.time(), RunFolder(folder)
    escalation = _escalation(run, attempt=attempt, ranks=ranks)
    with _forwarded_signals(escalation) as signals:
        child = subprocess.Popen(
            [*worker_command(folder), *(["-"] if config else [])],
            env={**os.environ, **worker_environment(ranks, attempt), **given_cores(ranks.started_by, os.environ)},
            stdin=subprocess.PIPE if config else None,
            start_new_session=True,
        )
        signals.forward_to(lambda number: ask_to_stop(child.pid, number) if child.poll() is None else None)
        if config:
            _write_line(child, f"{json.dumps(config)}\n")
        end_if_silent(
            run,
            ranks.rank,
            child,
            since=begin,
            must_end=lambda: escalation.is_due({ranks.rank: child.pid}),
            alone=ranks.world == 1,
        )
        code: int = -signal.SIGKILL
        # A process in state D (it waits for a device) does not end at SIGKILL.
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(KILL_SECONDS)
    return [Failure(rank=ranks.rank, exit_code=code)] if code else []


def _escalation(run: RunFolder, *, attempt: int | None, ranks: Ranks) -> Escalation:
    # Rank 0 has the terminal.
    console = Console(quiet=ranks.rank > 0)
    return Escalation(run, attempt=attempt, world=ranks.world, say=console.note)


def _write_line(child: subprocess.Popen[bytes], line: str) -> None:
    """Write a line to a child's standard input, and close it."""
    assert child.stdin is not None
    # The child has ended already: its exit code will show that.
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(line.encode())
        child.stdin.close()


def _start_many(folder: Path, places: list[Ranks], attempt: int, logs: Path) -> list[Failure]:
    begin, run = time.time(), RunFolder(folder)
    escalation = _escalation(run, attempt=attempt, ranks=places[0])
    with _forwarded_signals(escalation) as signals:
        with adopting() as can_fork:
            if can_fork:
                started = _forked(run, places, attempt, logs, signals, escalation)
            else:
                started = _one_by_one(folder, places, attempt, logs)
        if isinstance(started, Failure):
            return [started]
        signals.forward_to(started.ask_to_stop)
        return wait_for(started, run, since=begin, escalation=escalation)


def wait_for(
    started: RankProcesses, run: RunFolder, *, since: float, escalation: Escalation | None = None
) -> list[Failure]:
    """Wait until all ranks of a run have ended; after the failure of one, end the others.

    Args:
        since: when the attempt began, in seconds since the epoch.
        escalation: has heard of stop requests; None: there are none.

    Returns:
        the ranks that failed, by rank.
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
        note_silent_ranks(run, others, since=since, seconds=ANSWER_SECONDS)
        # Ranks that hang save nothing: they get no time to end.
        started.end(signal.SIGKILL if hangs else signal.SIGTERM, seconds=GRACE_SECONDS)
    codes = started.codes
    # Ranks that ended because of the first failure do not count.
    counted = failed or {rank for rank, code in codes.items() if code}
    if failed or hangs:
        counted |= left
    return [Failure(rank=rank, exit_code=code) for rank, code in codes.items() if rank in counted]


def _forked(
    run: RunFolder, places: list[Ranks], attempt: int, logs: Path, signals: _Signals, escalation: Escalation
) -> RankProcesses | Failure:
    """Start one process that forks the ranks and exits; this process becomes their parent (`titanlab.worker.fork`)."""
    reading, writing = os.pipe()
    forking = subprocess.Popen(
        worker_command(run.path),
        env={
            **os.environ,
            **worker_environment(places[0], attempt),
            PIDS_FILE: str(writing),
            LOGS: str(logs),
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
                # It ends now if it has not begun to fork; otherwise its ranks get the signal.
                ask_to_stop(forking.pid, signal.SIGTERM)
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
    processes = {
        place.rank: subprocess.Popen(
            worker_command(folder),
            env={
                **os.environ,
                **worker_environment(place, attempt),
                **({"TITANLAB_LOG": str(logs / f"rank-{place.rank}.log")} if place.rank else {}),
            },
            start_new_session=True,
        )
        for place in places
    }
    return RankProcesses({rank: process.pid for rank, process in processes.items()}, processes)


def worker_command(folder: Path) -> list[str]:
    """The command that starts one rank."""
    return [*module_command("titanlab.worker"), str(folder)]


def worker_environment(ranks: Ranks, attempt: int | None = None) -> dict[str, str]:
    """Environment variables of a rank that this process starts.

    Args:
        attempt: the number of the run's attempt, if all ranks get it.
    """
    own = {"TITANLAB_PARENT": str(os.getpid()), **launched_at()}
    return ranks.environment() | own | ({} if attempt is None else {"TITANLAB_ATTEMPT": str(attempt)})


class _Signals:
    """Forwards stop signals to the ranks; keeps signals that arrive before the ranks exist.

    Attributes:
        waiting: those that were not forwarded.
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
        """Set the receiver, and send it the signals that wait."""
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
    with handlers_kept((*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)):
        yield _Signals(escalation)
