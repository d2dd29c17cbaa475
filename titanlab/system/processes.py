"""Runs other programs; tells when a process started, and whether it is alive or stopped."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """How a program ended, and what it printed."""

    code: int  # its exit code; -N if signal N ended it
    # What it printed, with unchanged line ends; invalid UTF-8 becomes �.
    output: str
    errors: str

    @property
    def complaint(self) -> str:
        return " ".join((self.errors or self.output).split())


def run_command(*words: str, seconds: float = 60.0, environ: Mapping[str, str] | None = None) -> CommandResult | None:
    """Run a program and wait for its end.

    Returns:
        None if the program is missing, cannot run, or takes too long.
    """
    try:
        ended = subprocess.run(words, capture_output=True, timeout=seconds, check=False, env=environ)
    except (OSError, subprocess.SubprocessError):
        return None
    return CommandResult(
        code=ended.returncode,
        output=ended.stdout.decode(errors="replace"),
        errors=ended.stderr.decode(errors="replace"),
    )


def output_of(*words: str, seconds: float = 60.0, environ: Mapping[str, str] | None = None) -> str | None:
    """Run a program as `run_command` does. Returns its standard output; None also if its exit code is not 0."""
    answer = run_command(*words, seconds=seconds, environ=environ)
    return answer.output if answer is not None and answer.code == 0 else None


# States of a process that is stopped, by a signal or by a debugger.
STOPPED = ("T", "t")


def process_start(pid: int) -> float | None:
    """Start time of a process of this host, in seconds since the epoch, accurate to 0.01 s; None: not known.

    Known only on Linux (proc(5), `starttime`).
    """
    ticks = born_at(pid)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if ticks:
            return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return None


def born_at(pid: int) -> int | None:
    """Start time of a process of this host in kernel ticks; 0 if the system has no /proc; None if it is dead."""
    if fields := _status_fields(pid):
        return None if fields[0] in "ZX" else int(fields[19])
    with contextlib.suppress(OSError):
        if not Path("/proc/self/stat").exists():
            os.kill(pid, 0)
            return 0
    return None


def process_state(pid: int) -> str | None:
    """The state of a process's main thread as a letter, see proc(5); None if it cannot be read."""
    fields = _status_fields(pid)
    return fields[0] if fields else None


def _status_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat, see proc(5), from the state on; empty if they cannot be read."""
    with contextlib.suppress(OSError):
        # The name before the state is in brackets, and may itself contain brackets and spaces.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def stopped_note(pid: int) -> str:
    """A clause about a stopped process of this host, and how to continue it; empty if the process is not stopped."""
    state = process_state(pid)
    resume = f": `kill -CONT {pid}` lets it go on" if state == "T" else " by a debugger"
    return f"is stopped{resume}" if state in STOPPED else ""


_ROOT = Path(__file__).parents[2]


def module_command(name: str) -> list[str]:
    """The command that runs a module of titanlab.

    With -P, Python does not search the current folder: from there it would import a clone of titanlab, or a file named
    `random.py`, instead of what this process has imported. There is no -P if this process itself has imported titanlab
    from the current folder: by `python -m titanlab`, or in an interpreter or notebook (whose path has "") in a clone
    that is not installed.
    """
    options = [] if sys.path and Path(sys.path[0]).absolute() == _ROOT else ["-P"]
    return [sys.executable, *options, "-m", name]
