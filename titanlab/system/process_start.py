"""When a process has started, and whether it is alive."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


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
