"""When a process has started."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_start(pid: int) -> float | None:
    """When a process of this host has started, in seconds since the epoch, to a hundredth; None: it is not known.

    Only Linux tells it (proc(5), `starttime`).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        # The name is in brackets and may contain any character, also brackets and spaces.
        after_boot = int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age
