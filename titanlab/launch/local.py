"""launch=local: ranks as processes of this host.

Several ranks are started and watched by the process layer of torch's elastic agent. A single rank is a
plain child process: it spares the parent the import of torch, which is half of a short run's start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from titanlab.ranks import Ranks

POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that ended badly.

    Attributes:
        rank: its number.
        exit_code: of its process; -N where signal N ended it.
    """

    rank: int
    exit_code: int


def start(folder: Path, *, world: int, logs: Path) -> list[Failure]:
    """Run `titanlab.worker FOLDER` as `world` ranks and wait for their end.

    Rank 0 has this terminal; the others write to `logs/rank-N.log`. SIGINT and SIGTERM are handed on:
    the ranks agree on a step, save, and end.

    Returns:
        the ranks that ended badly, by rank. What each of them had to say is in the run's folder.
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
    return start_one(folder, places[0]) if world == 1 else _start_many(folder, places, logs)


def start_one(folder: Path, ranks: Ranks) -> list[Failure]:
    """Run the worker as one given rank, whose peers somebody else starts or which has none."""
    child = subprocess.Popen(_command(folder), env={**os.environ, **_environment(ranks)}, start_new_session=True)
    with _signals_go_to(lambda number: child.send_signal(number)):
        code = child.wait()
    return [Failure(rank=ranks.rank, exit_code=code)] if code else []


def _start_many(folder: Path, places: list[Ranks], logs: Path) -> list[Failure]:
    # Here, and not at the top: it imports torch.
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, start_processes

    # Our own lines say what happened; the agent's would say it again for every rank.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    ranks = range(len(places))
    executable, *arguments = _command(folder)

    class RunLogs(LogsSpecs):
        """Rank 0 on the terminal, the others each in a file of the run's folder."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            files = {rank: str(logs / f"rank-{rank}.log") if rank else "" for rank in ranks}
            errors = {rank: str(logs / f"rank-{rank}.error.json") for rank in ranks}
            nothing = dict.fromkeys(ranks, "")
            return LogsDest(files, dict(files), nothing, dict(nothing), errors, str(logs / "filtered.log"))

        @property
        def root_log_dir(self) -> str:
            return str(logs)

    context = start_processes(
        name="rank",
        entrypoint=executable,
        args={rank: tuple(arguments) for rank in ranks},
        envs={rank: _environment(places[rank]) for rank in ranks},
        logs_specs=RunLogs(),
    )

    def hand_on(number: int) -> None:
        for pid in context.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    with _signals_go_to(hand_on):
        while (result := context.wait(timeout=0)) is None:
            time.sleep(POLL_SECONDS)
    return [Failure(rank=rank, exit_code=failure.exitcode) for rank, failure in sorted(result.failures.items())]


def _command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "titanlab.worker", str(folder)]


def _environment(ranks: Ranks) -> dict[str, str]:
    return ranks.environment() | {"TITANLAB_PARENT": str(os.getpid())}


@contextlib.contextmanager
def _signals_go_to(hand_on: Callable[[int], None]) -> Iterator[None]:
    """Hand SIGINT and SIGTERM on instead of dying of them."""

    def handler(number: int, frame: FrameType | None) -> None:
        hand_on(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
