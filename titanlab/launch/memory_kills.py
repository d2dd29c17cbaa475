"""Whether the kernel has killed a process because memory ran out: its counters, before and after.

SIGKILL alone does not say who sent it. The kernel counts the processes that its out-of-memory killer has ended, for
every control group (`oom_kill` in memory.events of cgroup v2, in memory.oom_control of v1) and for the whole machine
(/proc/vmstat). See Documentation/admin-guide/cgroup-v2.rst of Linux.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class MemoryKills:
    """How many processes the kernel has killed because memory ran out.

    Attributes:
        place: what was counted: `its control group` or `this machine`; empty if the kernel has no counter.
        count: number of processes.
    """

    place: str
    count: int

    def rose(self, root: Path = _ROOT) -> str | None:
        """The kernel's kills since then, as an end for "killed by SIGKILL: …"; None if there were none."""
        now = memory_kills(root)
        if not self.place or now.place != self.place or now.count <= self.count:
            return None
        return f"the kernel has killed a process of {self.place} for want of memory"


def memory_kills(root: Path = _ROOT) -> MemoryKills:
    """The counter of this process's control group; without one, that of the machine.

    Args:
        root: of the file system; tests give another one.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            mount, file = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            mount, file = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # In a container, the mount may begin at the control group itself.
        for folder in (mount / path.lstrip("/"), mount):
            count = _count(folder / file)
            if count is not None:
                return MemoryKills("its control group", count)
    count = _count(root / "proc/vmstat")
    return MemoryKills("", 0) if count is None else MemoryKills("this machine", count)


def _count(path: Path) -> int | None:
    try:
        match = _COUNT.search(path.read_text())
    except OSError:
        return None
    return int(match[1]) if match else None
