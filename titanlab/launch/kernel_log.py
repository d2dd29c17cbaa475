"""Records of the kernel's log about processes that its out-of-memory killer has ended, where this user may read it.

/dev/kmsg gives one record a read: `PRIORITY,NUMBER,MICROSECONDS,FLAGS;MESSAGE`, see Documentation/ABI/testing/dev-kmsg
of Linux. Under `kernel.dmesg_restrict=1` only root may open it, and containers mostly have none. Names of processes in
it are chosen by any user: they are shortened and printed with the characters of plain names only.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

_READ_BYTES = 8_192
# The kernel's buffer has at most some MiB (log_buf_len).
_MOST_BYTES = 32 * 2**20
_MOST_SECONDS = 1.0
# Priorities below 8 are the kernel's own; what a program writes into the log has a higher one.
_RECORD = re.compile(r"^([0-7]),(\d{1,19}),\d{1,19},[^;]{0,64};(.{0,500})", re.MULTILINE)
_KILLED = re.compile(r"\bKilled process (\d{1,10}) \((.{0,64}?)\),? (?=total-vm:|UID|anon-rss:)")
_RSS = re.compile(r"\b(?:anon|file|shmem)-rss:(\d{1,15})kB")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")
# The inode of the first namespace of processes (PROC_PID_INIT_INO); only there a pid is the one that the log has.
_FIRST_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A process that the kernel has ended because memory ran out.

    Attributes:
        number: of the record.
        pid: as the host counts.
        name: of its program, shortened.
        rss_gib: memory that it had.
    """

    number: int
    pid: int
    name: str
    rss_gib: float

    @property
    def words(self) -> str:
        """Number, name and memory, for people."""
        return f"process {self.pid} ({self.name}), which had {self.rss_gib:.2f} GiB"


@dataclass(frozen=True, kw_only=True)
class KernelLog:
    """What the kernel's log has at one moment.

    Attributes:
        last: number of the newest record.
        killed: oldest first.
    """

    last: int
    killed: tuple[Killed, ...] = ()

    def since(self, before: KernelLog | None) -> tuple[Killed, ...]:
        """The processes that were ended after an earlier moment; none if that log is not known."""
        return () if before is None else tuple(process for process in self.killed if process.number > before.last)


def kernel_log(root: Path) -> KernelLog | None:
    """The kernel's log; None where this user cannot read it.

    Args:
        root: of the file system; tests give another one.
    """
    text = _text_of(root / "dev/kmsg")
    if text is None:
        return None
    last, killed = -1, []
    for record in _RECORD.finditer(text):
        number, message = int(record[2]), record[3]
        last = max(last, number)
        match = _KILLED.search(message)
        if match is not None:
            # After the name, which may look like a number of bytes.
            rss = sum(int(kib) for kib in _RSS.findall(message, match.end())) / 2**20
            name = _UNSAFE.sub("?", match[2])[:15] or "?"
            killed.append(Killed(number=number, pid=int(match[1]), name=name, rss_gib=rss))
    return KernelLog(last=last, killed=tuple(killed))


def has_pids_of_log(root: Path) -> bool:
    """Whether this process counts processes as the kernel's log does, which a container does not."""
    try:
        return os.readlink(root / "proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


def _text_of(path: Path) -> str | None:
    """All records, without waiting for another one; at most 32 MiB, in about one second."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    parts, size, end = [], 0, time.monotonic() + _MOST_SECONDS
    try:
        while size < _MOST_BYTES and time.monotonic() < end:
            try:
                part = os.read(descriptor, _READ_BYTES)
            except BrokenPipeError:
                continue  # The record was overwritten meanwhile; the next read gives the oldest one that is left.
            except OSError:
                break  # No further record (EAGAIN), or no permission.
            if not part:
                break
            parts.append(part)
            size += len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace") if parts else None
