"""When a process has started, whether it is alive, and whether it is stopped."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

# States of a process that is stopped, by a signal or by a debugger.
STOPPED = ("T", "t")


def process_start(pid: int) -> float | None:
    """When a process of this host has started, in seconds since the epoch, to a hundredth; None: it is not known.

    Only Linux tells it (proc(5), `starttime`).
    """
    ticks = born_at(pid)
    if not ticks:
        return None
    try:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    return time.time() - age


def born_at(pid: int) -> int | None:
    """Start time of a process of this host in kernel ticks; 0 if the system has no /proc; None if it is dead."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return 0
        return None
    except OSError:
        return None
    # The name is in brackets and may contain any character, also brackets and spaces.
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def process_state(pid: int) -> str | None:
    """The state of a process's main thread as a letter, see proc(5); None if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def stopped_note(pid: int) -> str:
    """A clause about a process of this host that is stopped, and how it goes on; empty if it is not."""
    state = process_state(pid)
    resume = f": `kill -CONT {pid}` lets it go on" if state == "T" else " by a debugger"
    return f"is stopped{resume}" if state in STOPPED else ""
