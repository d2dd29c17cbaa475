"""Whether the kernel has killed a process for want of memory: its own counters, before and after.

SIGKILL alone does not say who sent it. The kernel counts the processes of every control group that its out-of-memory
killer has ended (`oom_kill` in memory.events of cgroup v2, in memory.oom_control of v1), and those of the whole
machine (/proc/vmstat). See Documentation/admin-guide/cgroup-v2.rst of Linux.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class MemoryKills:
    """How many processes the kernel has killed for want of memory so far.

    Attributes:
        place: where they ran: `its control group` or `this machine`; empty where the kernel does not tell.
        count: how many.
    """

    place: str
    count: int

    def rose(self, root: Path = _ROOT) -> str | None:
        """What the kernel has done since, in words that end "killed by SIGKILL: …"; None where it did nothing."""
        now = memory_kills(root)
        if not self.place or now.place != self.place or now.count <= self.count:
            return None
        return f"the kernel has killed a process of {self.place} for want of memory"


def memory_kills(root: Path = _ROOT) -> MemoryKills:
    """The counter of this process's control group, or else of the machine.

    Args:
        root: of the file system; another one in tests.
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
        # In a container the mount may begin at the group itself.
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
