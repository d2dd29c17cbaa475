"""The worker of one rank, as a child process that ignores stop signals and reads stop requests from standard input.

Slurm sends a signal to all processes of a job at once, also to data readers and trackers. They all ignore stop signals
from their start; only the parent handles them and decides what they mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlab.distributed.ranks import Ranks
from titanlab.distributed.stop import STOP_SIGNALS, stop_line
from titanlab.launch.local.rank_processes import KILL_SECONDS
from titanlab.launch.local.ranks import worker_command, worker_environment
from titanlab.records.outcome import OutcomeKind


class Child:
    """A running worker.

    Args:
        folder: of the run.
        attempt: the number of the attempt that has begun.
        config: the recipe as plain values.
        log: file to which the output of the worker and its libraries is appended.
        environment: variables for the worker, in addition to this process's.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        attempt: int,
        config: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._log = log
        self._log_begin = log.stat().st_size if log.exists() else 0
        self._process = subprocess.Popen(
            [*worker_command(folder), "-"],
            env={
                **os.environ,
                **environment,
                **worker_environment(ranks, attempt),
                "TITANLAB_TOLD": "1",
                "TITANLAB_LOG": str(log),
            },
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_ignore_stop_signals,
        )
        self._write(json.dumps(config) + "\n")

    @property
    def pid(self) -> int:
        """The process number of the worker."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code of the worker, -N if signal N ended it; None while it runs."""
        return self._process.poll()

    def ask_to_stop(self, kind: OutcomeKind, cause: str) -> None:
        """Ask the worker to agree with the other ranks on a step, to save, and to end."""
        self._write(stop_line(kind, cause))
        # If it is stopped (SIGSTOP), it must wake to read the line.
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)

    def show_stacks(self) -> None:
        """Make the worker write the Python stacks of all its threads to its log."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> int:
        """Kill the worker and the processes that it has started. Returns its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process in state D (it waits for a device) does not end at SIGKILL.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(KILL_SECONDS)
        return -signal.SIGKILL

    def output(self, limit: int = 50_000) -> str:
        """The end of the worker's log, at most `limit` bytes."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log_begin, file.seek(0, os.SEEK_END) - limit))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        # The worker has ended already: its exit code will show that.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def _ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
