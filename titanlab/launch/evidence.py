"""Evidence of why a job ended, beside what its ranks recorded: kills by the kernel, printed lines, bad hosts.

SIGKILL alone does not say who sent it. The kernel counts the processes that its out-of-memory killer has ended, for
every control group (`oom_kill` in memory.events of cgroup v2, in memory.oom_control of v1) and for the whole machine
(/proc/vmstat). See Documentation/admin-guide/cgroup-v2.rst of Linux.

`hosts.jsonl` in the folder of all runs has a line for each failure that its host may have caused. Later jobs of the
same run leave these hosts out, until a person clears them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from titanlab.distributed import memory_groups
from titanlab.records import KillEvidence, Outcome, OutcomeKind, RunFolder, Status, loaded, text_at_end
from titanlab.system import born_at, open_to_write, process_start, read_text, user_path, write_text

_ROOT = Path("/")


def may_work(status: Status | None, *, silent_seconds: float, here_seconds: float = 0.0) -> bool:
    """Whether another process, which wrote this status, may still work on the run.

    Args:
        silent_seconds: how long after its status a process of another host, which cannot be seen, counts as working.
        here_seconds: the same for a process of this host that has ended: its ranks may live longer.
    """
    if status is None or status.state in ("prepared", "ended"):
        return False
    is_here = status.host == socket.gethostname()
    if is_here and status.pid != os.getpid() and born_at(status.pid) is not None:
        # If the process with this number started after the status was written, another process wrote the status.
        start = process_start(status.pid)
        if start is None or start <= status.updated:
            return True
    # If the clock of the other host is ahead, the status seems to come from the future: do not wait longer for that.
    return max(0.0, time.time() - status.updated) < (here_seconds if is_here else silent_seconds)


@dataclass(frozen=True)
class MemoryKills:
    """How many processes the kernel has killed because memory ran out.

    Attributes:
        place: what was counted: `its control group` or `this machine`; empty if the kernel has no counter.
        machine: the count for the whole machine; None if the kernel has no such counter.
    """

    place: str
    count: int
    machine: int | None = None

    def evidence(self, root: Path = _ROOT) -> KillEvidence | None:
        """Whether the kernel has killed a process since this count; None if that is not known.

        `by_kernel` is False only if the kernel has killed nothing on the whole machine: the killed process may have
        been in another control group.
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
    """The kernel's present count for this process's control group; without such a counter, for the machine."""

    def count(path: Path) -> int | None:
        try:
            match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            return None
        return int(match[1]) if match else None

    machine = count(root / "proc/vmstat")
    for folder in memory_groups(root):
        for name in ("memory.events", "memory.oom_control"):
            if (number := count(folder / name)) is not None:
                return MemoryKills("its control group", number, machine)
    return MemoryKills("", 0) if machine is None else MemoryKills("this machine", machine, machine)


_LIMIT = 400
# submitit's names of logs: JOB_RANK_log.err, where JOB may contain underscores too.
_RANK = re.compile(r"_(\d+)_log\.(?:err|out)")
# What a task prints on standard output if it cannot begin: the time, then the error.
_REFUSAL = re.compile(r"(?:\d\d:\d\d:\d\d +)?error: (.+)")
# The last line that a program prints after a wrong option; it does not name the mistake.
_HINT = re.compile(r"Try ['\"].* --help['\"] for more information\.?")


def early_end(logs: Iterable[Path], *, besides: str | None = None) -> str | None:
    """Why a job failed before its run began, in one line; None if its processes have printed no reason.

    Such a job has no attempt and no record: its interpreter is missing, a module cannot be imported, its container does
    not start. The last line that its processes have printed is then the reason.

    Args:
        logs: what the job's processes have printed; standard error has priority, then the lowest rank.
        besides: a pattern of lines, such as those of a scheduler, that are used only if there are no other lines.
    """

    def order(path: Path) -> tuple[bool, int, str]:
        match = _RANK.search(path.name)
        return path.suffix != ".err", int(match[1]) if match is not None else 0, path.name

    for path in sorted(logs, key=order):
        lines = [line for line in printed_lines(path) if _HINT.fullmatch(line) is None]
        if path.suffix != ".err":
            lines = [refusal[1] for line in lines if (refusal := _REFUSAL.fullmatch(line)) is not None]
        own = [line for line in lines if besides is None or re.match(besides, line) is None]
        if lines:
            return f"ended before the run began: {(own or lines)[-1]}"
    return None


def printed_lines(path: Path, *, begin: int = 0) -> list[str]:
    """The lines at the end of a file that are not empty, each of bounded length; none if it cannot be read.

    Args:
        begin: skip lines before this byte.
    """
    text = text_at_end(path, begin=begin)
    lines = []
    for line in text.splitlines():
        printable = "".join(character if character.isprintable() else " " for character in line)
        if words := " ".join(printable.split()):
            lines.append(words if len(words) <= _LIMIT else f"{words[: _LIMIT - 3]}...")
    return lines


FILE = "hosts.jsonl"
# Host names become arguments of a scheduler's command.
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


@dataclass(frozen=True)
class BadHost:
    """One failure on a host: the name of the run's folder, and the kind of the outcome."""

    host: str
    run: str
    attempt: int
    kind: str
    cause: str
    time: float


def suspect(outcome: Outcome, nodes: Sequence[str], *, ranks_per_node: int) -> str | None:
    """The host that may have caused a failure; None: no host caused it, or the host is not known.

    A host may cause a hang, the failure of a node, and the end of a rank by a signal. Python errors, lack of memory and
    numbers that are not finite come from the recipe or the code.
    """
    killed = outcome.kind is OutcomeKind.CRASH and outcome.traceback is None and (outcome.exit_code or 0) < 0
    if not killed and outcome.kind not in (OutcomeKind.HANG, OutcomeKind.NODE_FAIL):
        return None
    if len(nodes) == 1:
        return nodes[0]
    if outcome.rank is None or not nodes:
        return None
    node = outcome.rank // max(1, ranks_per_node)
    return nodes[node] if node < len(nodes) else None


def note_bad_host(run: RunFolder, outcome: Outcome, host: str) -> None:
    """Add a failure on a host to `hosts.jsonl`; does nothing if the file cannot be written."""
    if not _HOST.fullmatch(host):
        return
    cause = outcome.cause or outcome.kind.meaning
    bad = BadHost(host, run.path.name, outcome.attempt, outcome.kind.value, cause, round(time.time(), 3))
    with contextlib.suppress(OSError):
        file = user_path(run.path.parent.parent) / FILE
        descriptor = open_to_write(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            # Write the line in one call, because several jobs may write at the same time.
            os.write(descriptor, _line(bad).encode())
        finally:
            os.close(descriptor)


def bad_hosts(runs: Path) -> list[BadHost]:
    """The failures in `hosts.jsonl`, oldest first; damaged or unknown lines are skipped."""
    # Imported here: the start of a run needs msgspec only after a failure.
    import msgspec

    found = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in read_text(user_path(runs) / FILE).split("\n"):
            with contextlib.suppress(ValueError, msgspec.ValidationError):
                bad = msgspec.convert(loaded(line), BadHost)
                found += [bad] if _HOST.fullmatch(bad.host) else []
    return found


def clear_bad_hosts(runs: Path, host: str | None = None) -> int:
    """Forget the failures on a host, or on all hosts. Returns the number of these failures."""
    before = bad_hosts(runs)
    after = [] if host is None else [bad for bad in before if bad.host != host]
    if len(after) < len(before):
        write_text(user_path(runs) / FILE, "".join(map(_line, after)))
    return len(before) - len(after)


def host_names(bad: Sequence[BadHost]) -> list[str]:
    """Hosts, each once, in the order of their first failure."""
    return list(dict.fromkeys(failure.host for failure in bad))


def _line(bad: BadHost) -> str:
    return json.dumps(asdict(bad), ensure_ascii=False) + "\n"
