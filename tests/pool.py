"""A pool of worker processes for tests that need several ranks.

A server process imports torch once, and the workers are forked from it, once; `Pool.run` calls a function in the first few of them, each with the
environment of its rank. A failure, a hang or a death of one rank ends the call with that rank's own traceback or
stacks, and the pool stays usable.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from titanlab.distributed import free_port

# Time for the other ranks to notice that one has failed; after it they are ended.
GRACE_SECONDS = 2.0
START_SECONDS = 120.0
CLEAR_SECONDS = 10.0
# Beside a second pytest worker the ranks of the pool give way: the other worker's tests of ranks that die or hang have
# limits of a few seconds, and the pool's calls have limits of minutes.
NICENESS = 10
# torch's compiler never frees some process groups, and the threads of each keep waking up. With more threads than this
# a new worker is cheaper.
MANY_THREADS = 150
# What ranks import: a worker that imports it by itself takes seconds of a core. None of these starts a thread or opens a
# device when it is imported.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "titanlab.train.train",
)


class RankFailure(Exception):
    """A call in the pool failed; the message has the traceback or the stacks of the rank that caused it."""


class Pool:
    """Persistent worker processes that play the ranks of small process groups.

    Args:
        size: most ranks of one call.
        warning_filters: lines of pytest's `filterwarnings`, applied in the workers too.
        environment: variables of the workers, whenever they start; by default those of now.
    """

    def __init__(
        self, size: int, *, warning_filters: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.size = size
        # A worker may start while a test has variables of its own.
        self._environment = dict(os.environ if environment is None else environment)
        self._filters = tuple(warning_filters)
        self._workers: list[_Worker | None] = [None] * size

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *arguments: Any,
        limit_seconds: float = 120.0,
        grace_seconds: float = GRACE_SECONDS,
    ) -> list[Any]:
        """Call `function(*arguments)` as ranks 0 to world − 1 and return what each returned, by rank.

        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set; the function opens
        the process group if it wants one, and the pool destroys it. Arguments and results travel by pickle.

        Args:
            grace_seconds: how long the other ranks may take to end after one has failed.

        Raises:
            RankFailure: a rank raised, died or did not return within `limit_seconds`.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"the pool has {self.size} workers, not {world}")
        try:
            call = pickle.dumps((function, arguments))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(f"workers cannot import {function!r} or its arguments: {error}") from error
        workers = self._ready(world)
        port = free_port()
        for rank, worker in enumerate(workers):
            worker.send(("call", call, _environment(rank, world, port)))
        answers = self._gather(workers, limit_seconds, grace_seconds)
        failures = {rank: answer for rank, answer in answers.items() if answer[0] != "value"}
        if failures:
            raise RankFailure(_describe(failures, world))
        return [pickle.loads(answers[rank][1]) for rank in range(world)]

    def close(self) -> None:
        """End the workers."""
        for index in range(self.size):
            self._drop(index)

    def _ready(self, world: int) -> list[_Worker]:
        """The first `world` workers; missing ones are started at the same time."""
        workers = []
        for index in range(world):
            worker = self._workers[index]
            if worker is None or not worker.process.is_alive() or worker.threads > MANY_THREADS:
                self._drop(index)
                worker = self._workers[index] = _Worker(self._filters, self._environment)
            workers.append(worker)
        for index, worker in enumerate(workers):
            if not worker.wait_ready(START_SECONDS):
                self._drop(index)
                raise RankFailure(f"worker {index} did not start within {START_SECONDS:.0f} s")
        return workers

    def _gather(
        self, workers: list[_Worker], limit_seconds: float, grace_seconds: float
    ) -> dict[int, tuple[str, Any, float]]:
        """One answer a rank: ("value" | "raised" | "died" | "hung", content, when)."""
        answers: dict[int, tuple[str, Any, float]] = {}
        end = time.monotonic() + limit_seconds
        while len(answers) < len(workers):
            waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in answers}
            for connection in wait(list(waiting), timeout=max(0.0, end - time.monotonic())):
                rank = waiting[connection]  # type: ignore[index]
                answers[rank] = workers[rank].receive()
                if answers[rank][0] != "value":
                    end = min(end, time.monotonic() + grace_seconds)
            if time.monotonic() >= end:
                break
        reason = f"did not return within {limit_seconds:g} s"
        if any(kind != "value" for kind, *_ in answers.values()):
            reason = "was still at work when another rank had failed"
        late = [rank for rank in range(len(workers)) if rank not in answers]
        stacks = [workers[rank].stacks() for rank in late]
        for rank, text in zip(late, stacks, strict=True):
            answers[rank] = ("hung", f"{reason}\n{text}", time.monotonic())
        for rank, worker in enumerate(workers):
            if answers[rank][0] in ("hung", "died"):
                self._drop(rank)
            else:
                worker.send(("clear",))
        return answers

    def _drop(self, index: int) -> None:
        worker, self._workers[index] = self._workers[index], None
        if worker is not None:
            worker.end()


class _Worker:
    """One process of the pool, as the process of the tests uses it."""

    def __init__(self, filters: Sequence[str], environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        # Has an effect before the first worker only.
        context.set_forkserver_preload(list(PRELOADED))
        self.connection, theirs = context.Pipe()
        handle, name = tempfile.mkstemp(prefix="titanlab-stacks-")
        os.close(handle)
        self._stacks = Path(name)
        self._busy = True
        # As a daemon it ends with pytest; it also watches for a server that is gone, which ends when pytest is killed.
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, name, tuple(filters), dict(environment)), daemon=True
        )
        self.process.start()
        theirs.close()

    @property
    def threads(self) -> int:
        """Number of its threads, including those of libraries; 0 if the system has no /proc."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return len(list(tasks.iterdir())) if tasks.is_dir() else 0

    def wait_ready(self, seconds: float) -> bool:
        """Wait until it has started, or has cleaned up after its last call."""
        if self._busy:
            with contextlib.suppress(EOFError, OSError):
                self._busy = not (self.connection.poll(seconds) and self.connection.recv_bytes() == b"ready")
        return not self._busy

    def send(self, message: tuple[Any, ...]) -> None:
        self._busy = True
        # If the worker died, `receive` reports it.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> tuple[str, Any, float]:
        try:
            kind, content, when = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(5)
            return ("died", f"the process ended with exit code {self.process.exitcode}", time.monotonic())
        return (kind, content, when)

    def stacks(self) -> str:
        """The stacks of its threads."""
        with contextlib.suppress(OSError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        time.sleep(0.2)
        return self._stacks.read_text() or "(its threads could not be seen)"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()
        self._stacks.unlink(missing_ok=True)


def _describe(failures: dict[int, tuple[str, Any, float]], world: int) -> str:
    """The failures in order of time: the first is usually the cause."""
    # A rank that waits for a lost one raises soon after it; hanging ranks are noticed last.
    order = sorted(failures, key=lambda rank: (failures[rank][0] == "hung", failures[rank][2]))
    parts = []
    for rank in order:
        kind, text, _ = failures[rank]
        parts.append(f"rank {rank} of {world} {text}" if kind == "hung" else f"rank {rank} of {world}: {text}")
    return "\n\n".join(parts)


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _serve(connection: Connection, stacks: str, filters: Sequence[str], environment: Mapping[str, str]) -> None:
    """The loop of a worker: wait for a call, make it, answer, clean up."""
    os.environ.clear()
    os.environ.update(environment)
    if "PYTEST_XDIST_WORKER" in environment:
        os.nice(NICENESS)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with Path(stacks).open("w") as stacks_file:
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        # Ctrl-C is for pytest, which then ends the workers.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        import torch.distributed

        # With more threads, sums are rounded in another order.
        torch.set_num_threads(1)
        gc.freeze()
        connection.send_bytes(b"ready")
        while True:
            try:
                message = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            if message[0] == "call":
                with _restored_settings():
                    answer = _answer(message[1], message[2], filters)
                    connection.send_bytes(answer)
                    if pickle.loads(answer)[0] == "value":
                        # Rank 0 may hold the store that others still need: all answer before any cleans up.
                        connection.recv_bytes()
                        _leave_groups()
                    else:
                        # Ranks that wait for this one must notice that it is gone.
                        _leave_groups()
                        connection.recv_bytes()
                gc.collect()
                # The remaining objects are mostly modules, which later collections need not scan.
                gc.freeze()
                connection.send_bytes(b"ready")


def _answer(call: bytes, environment: dict[str, str], filters: Sequence[str]) -> bytes:
    os.environ.update(environment)
    try:
        with warnings.catch_warnings():
            _apply_filters(filters)
            function, arguments = pickle.loads(call)
            value = pickle.dumps(function(*arguments))
    except BaseException:
        # SystemExit and pytest's own outcomes do not derive from Exception and are reported as well.
        return pickle.dumps(("raised", traceback.format_exc(), time.monotonic()))
    return pickle.dumps(("value", value, time.monotonic()))


def _apply_filters(filters: Sequence[str]) -> None:
    # pytest has no public function that parses these lines.
    from _pytest.config import apply_warning_filters

    apply_warning_filters(filters, ())


def _leave_groups() -> None:
    """Destroy the process groups that a call left, and torch's caches that refer to them."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        # Compiled code keeps models alive, and with them process groups and their threads.
        sys.modules["torch._dynamo"].reset()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        # For an equal mesh the cache returns specs of the old mesh, whose groups are destroyed.
        debug._clear_sharding_prop_cache()


@contextlib.contextmanager
def _restored_settings() -> Iterator[None]:
    """Restore environment, folder and settings of torch after a call, for the next one."""
    import torch

    environment, folder = dict(os.environ), Path.cwd()
    torch.manual_seed(0)
    random.seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
