"""Whether the kernel has killed a process because memory ran out: its counters, before and after.

SIGKILL alone does not say who sent it. The kernel counts the processes that its out-of-memory killer has ended, for
every control group (`oom_kill` in memory.events of cgroup v2, in memory.oom_control of v1) and for the whole machine
(/proc/vmstat). See Documentation/admin-guide/cgroup-v2.rst of Linux.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from titanlab.records.outcome import KillEvidence

_ROOT = Path("/")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class MemoryKills:
    """How many processes the kernel has killed because memory ran out.

    Attributes:
        place: what was counted: `its control group` or `this machine`; empty if the kernel has no counter.
        count: number of processes.
        machine: number on the whole machine; None if the kernel has no counter of it.
    """

    place: str
    count: int
    machine: int | None = None

    def evidence(self, root: Path = _ROOT) -> KillEvidence | None:
        """Whether the kernel has sent a SIGKILL since then; None if that is not known.

        It is ruled out only if the kernel has killed nothing on the whole machine: the process may have been in another
        control group.
        """
        now = memory_kills(root)
        if self.place and now.place == self.place and now.count > self.count:
            words = f"the kernel has killed a process of {self.place} for want of memory"
            return KillEvidence(by_kernel=True, words=words)
        if self.machine is not None and now.machine == self.machine and now.place == self.place:
            words = "the kernel has killed nothing for want of memory, so a person or another program has sent it"
            return KillEvidence(by_kernel=False, words=words)
        return None


def memory_kills(root: Path = _ROOT) -> MemoryKills:
    """The counter of this process's control group; without one, that of the machine.

    Args:
        root: of the file system; tests give another one.
    """
    machine = _count(root / "proc/vmstat")
    count = _count_of_group(root)
    if count is not None:
        return MemoryKills("its control group", count, machine)
    return MemoryKills("", 0) if machine is None else MemoryKills("this machine", machine, machine)


def _count_of_group(root: Path) -> int | None:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
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
                return count
    return None


def _count(path: Path) -> int | None:
    try:
        match = _COUNT.search(path.read_text())
    except OSError:
        return None
    return int(match[1]) if match else None
