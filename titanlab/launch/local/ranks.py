"""Ranks as processes of this host.

Several ranks are started and watched by the process layer of torch's elastic agent. A single rank is a
plain child process: then the parent need not import torch, which takes half of a short run's start time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from titanlab.distributed.ranks import Ranks
from titanlab.distributed.silence import ANSWER_SECONDS, end_if_silent, hangs_of_others, note_silent_ranks
from titanlab.distributed.stop import STOP_SIGNALS, caught_signals, handlers_kept
from titanlab.launch.contract import Failure
from titanlab.records.run_folder import RunFolder

POLL_SECONDS = 0.1
# The other ranks have this time to end after one has failed.
GRACE_SECONDS = 5
# Between two looks for notes of ranks that hang.
_HANG_LOOK_SECONDS = 0.5


def start(folder: Path, *, attempt: int, world: int, logs: Path) -> list[Failure]:
    """Run `titanlab.worker FOLDER` as `world` ranks and wait until they end.

    Rank 0 writes to this terminal; the others write to `logs/rank-N.log`. SIGINT, SIGTERM and a scheduler's warnings
    are forwarded: the ranks agree on a step, save, and end.

    Returns:
        the ranks that failed, by rank. Their own records of the failure are in the run's folder.
    """
    port = _free_port()
    places = [
        Ranks(
            rank=rank,
            world=world,
            local_rank=rank,
            local_world=world,
            address="127.0.0.1",
            port=port,
            started_by="local",
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
    begin = time.time()
    with _forwarded_signals() as signals:
        child = subprocess.Popen(
            [*worker_command(folder), *(["-"] if config else [])],
            env={**os.environ, **worker_environment(ranks, attempt)},
            stdin=subprocess.PIPE if config else None,
            start_new_session=True,
        )
        signals.forward_to(child.send_signal)
        if config:
            _write_line(child, f"{json.dumps(config)}\n")
        if ranks.world > 1:
            end_if_silent(RunFolder(folder), ranks.rank, child, since=begin)
        child.wait()
    return [Failure(rank=ranks.rank, exit_code=child.returncode)] if child.returncode else []


def _write_line(child: subprocess.Popen[bytes], line: str) -> None:
    """Write a line to a child's standard input, and close it."""
    assert child.stdin is not None
    # The child has ended already: its exit code will show that.
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(line.encode())
        child.stdin.close()


def _start_many(folder: Path, places: list[Ranks], attempt: int, logs: Path) -> list[Failure]:
    # Imported here: it imports torch, which a single rank does not need in this process.
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, start_processes

    # titanlab reports the failure in its own lines; the agent would repeat it for every rank.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    ranks = range(len(places))
    executable, *arguments = worker_command(folder)
    begin = time.time()

    class OwnStreams(LogsSpecs):
        """No redirection: the agent would open new logs for each attempt, and separate ones for output and errors."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            nothing = dict.fromkeys(ranks, "")
            errors = {rank: str(logs / f"rank-{rank}.error.json") for rank in ranks}
            return LogsDest(nothing, dict(nothing), dict(nothing), dict(nothing), errors)

        @property
        def root_log_dir(self) -> str:
            return str(logs)

    own_log = {rank: {"TITANLAB_LOG": str(logs / f"rank-{rank}.log")} if rank else {} for rank in ranks}
    with _forwarded_signals() as signals:
        context = start_processes(
            name="rank",
            entrypoint=executable,
            args={rank: tuple(arguments) for rank in ranks},
            envs={rank: worker_environment(places[rank], attempt) | own_log[rank] for rank in ranks},
            logs_specs=OwnStreams(),
        )
        pids = context.pids()
        # Only now: `start_processes` has installed its own handlers, which raise.
        signals.forward_to(lambda number: _send(pids.values(), number))
        # After the first failure, the agent alone would give the other ranks 30 s, and count them as failed too.
        run = RunFolder(folder)
        failed, left = _wait_for_failure(pids, lambda: bool(hangs_of_others(run, None, since=begin)))
        hangs = bool(hangs_of_others(run, None, since=begin))
        if failed or hangs:
            others = {rank: pid for rank, pid in pids.items() if rank not in failed | left}
            note_silent_ranks(run, others, since=begin, seconds=ANSWER_SECONDS)
            # Ranks that hang save nothing: they get no time to end.
            context.close(signal.SIGKILL if hangs else None, timeout=GRACE_SECONDS)
        result = context.wait()
    failures = result.failures if result is not None else {}
    return [
        Failure(rank=rank, exit_code=failure.exitcode)
        for rank, failure in sorted(failures.items())
        if rank in failed or not failed
    ] + [Failure(rank=rank, exit_code=0) for rank in sorted(left) if failed or hangs]


def worker_command(folder: Path) -> list[str]:
    """The command that starts one rank."""
    return [sys.executable, "-m", "titanlab.worker", str(folder)]


def worker_environment(ranks: Ranks, attempt: int | None = None) -> dict[str, str]:
    """Environment variables of a rank that this process starts.

    Args:
        attempt: the number of the run's attempt, if all ranks get it.
    """
    own = {"TITANLAB_PARENT": str(os.getpid())}
    return ranks.environment() | own | ({} if attempt is None else {"TITANLAB_ATTEMPT": str(attempt)})


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_for_failure(pids: Mapping[int, int], hangs: Callable[[], bool]) -> tuple[set[int], set[int]]:
    """Wait until a rank fails, ranks hang, or all ranks have ended well.

    The processes stay unreaped, for the agent to wait for. Without `os.waitid` (macOS) it returns at once.

    Args:
        hangs: whether ranks have noted that they hang.

    Returns:
        the ranks that failed, and those that ended with exit code 0.
    """
    running, failed, left = dict(pids), set[int](), set[int]()
    look = time.monotonic() + _HANG_LOOK_SECONDS
    while running and not failed and hasattr(os, "waitid"):
        for rank, pid in list(running.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                del running[rank]
                (left if ended.si_status == 0 else failed).add(rank)
        if time.monotonic() > look:
            if hangs():
                break
            look = time.monotonic() + _HANG_LOOK_SECONDS
        time.sleep(POLL_SECONDS)
    return failed, left


class _Signals:
    """Forwards stop signals to the ranks; keeps signals that arrive before the ranks exist."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
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
        while self._waiting:
            send(self._waiting.pop(0))

    def _handler(self, number: int, frame: FrameType | None) -> None:
        if self._send is None:
            self._waiting.append(number)
        else:
            self._send(number)


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[_Signals]:
    """Forward stop signals instead of dying of them; afterwards restore all handlers."""
    with handlers_kept((*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)):
        yield _Signals()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
