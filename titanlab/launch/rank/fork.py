"""The ranks of one host, forked from one process that has imported torch.

The import of torch and the trainer takes each process 2 s of processor time and 200 MB. Forked ranks share both. The
process that forks them exits at once; the launcher adopts the ranks, so it can wait for them as if it had started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from titanlab.distributed import ALONE, LOG, PARENT, PIDS_FILE, STOP_SIGNALS, Ranks, joined

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_ADOPTION_POLL_SECONDS = 0.002

T = TypeVar("T")


@contextlib.contextmanager
def adopting() -> Iterator[bool]:
    """Let this process become the parent of processes whose parent exits inside the block.

    Yields:
        whether this process will become the parent: only on Linux (prctl(2): PR_SET_CHILD_SUBREAPER).
    """
    can = _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield can
    finally:
        if can:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def fork_ranks(logs: Path, prepare: Callable[[], T]) -> T:
    """Fork every rank of this host. This process itself exits.

    Args:
        logs: folder for the output of the ranks, except rank 0, which writes to the launcher's output.
        prepare: called before the fork, with the environment of rank 0.

    Returns:
        what `prepare` has returned. Only the ranks return, each with its environment set; they share this value.
    """
    pids_file = int(os.environ.pop(PIDS_FILE))
    end_with_parent()
    first = joined(os.environ) or ALONE
    prepared = prepare()
    # Exempt the shared objects from garbage collection: it would write to their memory pages, and so copy the pages.
    gc.collect()
    gc.freeze()
    # Hold stop signals until a rank can note them: `hear_stop_signals`.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    forking = os.getpid()
    is_rank, pids = _fork_each(first, logs, terminal=True)
    if is_rank:
        os.close(pids_file)
        while os.getppid() == forking:
            time.sleep(_ADOPTION_POLL_SECONDS)
        # Leave the process group only now: until here, the launcher can kill ranks and forking process as one group.
        os.setsid()
        return prepared
    with os.fdopen(pids_file, "w") as file:
        json.dump(pids, file)
    os._exit(0)


def fork_children(first: Ranks, logs: Path, act: Callable[[], int]) -> dict[int, int]:
    """Fork every rank of a run as a child of this process, which has imported torch. Returns process numbers by rank.

    Args:
        act: called in each rank, with its environment; returns its exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        # Without this, each rank would write the content of the buffers again.
        stream.flush()
    parent, code = os.getpid(), 1
    try:
        is_rank, pids = _fork_each(first, logs, terminal=False)
        if is_rank:
            os.environ[PARENT] = str(parent)
            os.setsid()
            code = act()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        return pids
    finally:
        # No rank may return into the code of its parent, not even after an error.
        if os.getpid() != parent:
            os._exit(code)


def _fork_each(first: Ranks, logs: Path, *, terminal: bool) -> tuple[bool, dict[int, int]]:
    """Fork every rank, with its environment, log and name. Returns whether this process is a rank, and the pids.

    Args:
        terminal: rank 0 writes to the terminal, and has no log of its own.
    """
    pids: dict[int, int] = {}
    for rank in range(first.world):
        with warnings.catch_warnings():
            # Python warns of every thread, although numpy's BLAS ends its threads before a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pids[rank] = os.fork()
        if not pids[rank]:
            os.environ.update(replace(first, rank=rank, local_rank=rank).environment())
            if rank or not terminal:
                os.environ[LOG] = str(logs / f"rank-{rank}.log")
            # ps and top show this name; the command line is the same for all ranks.
            _prctl(_PR_SET_NAME, f"rank {rank}".encode())
            return True, pids
    return False, pids


def hear_stop_signals() -> None:
    """Deliver the stop signals that were blocked until this process could handle them.

    From now on, if the launcher dies, this rank is asked to stop (`stop_request`) and not killed. Linux then sends
    SIGCONT, which wakes a rank that SIGSTOP has stopped.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGHUP))
    if PARENT in os.environ:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def end_with_parent() -> None:
    """Ask Linux to kill this process when its launcher dies, so that no rank is left behind."""
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        # The launcher died before the call of prctl.
        sys.exit(1)


def _prctl(option: int, value: int | bytes) -> bool:
    """Set an attribute of this process. Returns False if the system has no such attribute."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(option, value) == 0)
