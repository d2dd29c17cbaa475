"""The processes of a run's ranks on this host: waited for, signalled, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

_POLL_SECONDS = 0.05
# Between two looks for notes of ranks that hang.
_HANG_LOOK_SECONDS = 0.5
# A process in state D (it waits for a device) does not end at SIGKILL.
KILL_SECONDS = 30.0


class RankProcesses:
    """Child processes of this process, each the leader of a session, by rank.

    Args:
        pids: process number by rank.
        started: those that this process has started itself; the others were adopted.
    """

    def __init__(self, pids: Mapping[int, int], started: Mapping[int, subprocess.Popen[bytes]] | None = None) -> None:
        self.pids = dict(pids)
        self._started = dict(started or {})
        self._codes: dict[int, int] = {}

    def running(self) -> dict[int, int]:
        """The processes that have not ended; reaps the others."""
        for rank in self.pids.keys() - self._codes.keys():
            try:
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            except ChildProcessError:
                # SIGCHLD is ignored, as some programs that start this one leave it: then no exit codes are kept.
                pid, status = self.pids[rank], 0
            if pid:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
                if self._codes[rank]:
                    # What it has started ends with it. As long as one of them lives, no other process gets this number.
                    with contextlib.suppress(OSError):
                        os.killpg(pid, signal.SIGKILL)
                if rank in self._started:
                    self._started[rank].returncode = self._codes[rank]
        return {rank: pid for rank, pid in self.pids.items() if rank not in self._codes}

    @property
    def codes(self) -> dict[int, int]:
        """Exit code of each rank that has ended, by rank; -N for signal N."""
        self.running()
        return dict(sorted(self._codes.items()))

    def ask_to_stop(self, number: int) -> None:
        """Send a stop signal to every rank that has not ended."""
        for pid in self.running().values():
            ask_to_stop(pid, number)

    def wait_for_failure(self, hangs: Callable[[], bool], is_due: Callable[[], bool]) -> tuple[set[int], set[int]]:
        """Wait until a rank fails, ranks hang or must be killed, or all ranks have ended well.

        Args:
            hangs: whether ranks have noted that they hang.
            is_due: whether the ranks must be killed for another reason; it is asked at every poll.

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
        """End all ranks, with the processes that they have started: by a signal, then by SIGKILL.

        Args:
            seconds: the time between the two.
        """
        for send, limit in ((number, seconds), (signal.SIGKILL, KILL_SECONDS)):
            for pid in self.running().values():
                with contextlib.suppress(ProcessLookupError):
                    # A rank that has just been forked may not yet lead a group.
                    (os.killpg if _leads_group(pid) else os.kill)(pid, send)
            end = time.monotonic() + limit
            while self.running() and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)


def ask_to_stop(pid: int, number: int) -> None:
    """Send a stop signal to a process, and wake it if it is stopped (SIGSTOP): otherwise it would not hear of it."""
    for each in (number, signal.SIGCONT):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, each)


def _leads_group(pid: int) -> bool:
    return os.getpgid(pid) == pid
