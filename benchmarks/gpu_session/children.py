"""Processes that measure one row: when their time is over, they are ended with all that they have started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MARK = "TITANLAB_GPU_SESSION_ROW"
_SESSION = f"{os.getpid()}.{uuid.uuid4().hex}"
# Of another launcher, under which the session may run: a row is one process of its own.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_folders: set[Path] = set()


class SessionError(Exception):
    """Why a session cannot begin or go on, in one line."""


@dataclass(frozen=True)
class Ended:
    """How a process has ended.

    Attributes:
        code: its exit code; None: it was ended because its time was over.
        text: what it printed.
        seconds: how long it ran.
    """

    code: int | None
    text: str
    seconds: float

    @property
    def last_line(self) -> str:
        """The last line that says something."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}, nothing printed"


def run(command: Sequence[str], *, folder: Path, limit: float) -> Ended:
    """Run a command in a folder, for `limit` seconds at most.

    Ranks and compilers have sessions of their own, so that ending a process group would leave them on the GPU: all
    processes that have inherited this one's mark are ended.
    """
    mark = f"{_MARK}={_SESSION}.{uuid.uuid4().hex}"
    started = time.monotonic()
    log = folder / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=_environment(mark)
        )
        try:
            process.wait(timeout=max(limit, 0.1))
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_marked(mark)
            process.wait()
    return Ended(code, log.read_text(errors="replace"), time.monotonic() - started)


@contextlib.contextmanager
def folder_of_its_own() -> Iterator[Path]:
    """An empty folder for a process, which is removed afterwards, also by `end_all`."""
    path = Path(tempfile.mkdtemp(prefix="gpu-session-"))
    _folders.add(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        _folders.discard(path)


def python(*arguments: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, *arguments]


def end_all() -> None:
    """End what all rows of this session have started, and remove their folders."""
    _end_marked(f"{_MARK}={_SESSION}.")
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)


def end_orphans() -> int:
    """End what sessions have left that were killed: it would slow this one down. Returns how many processes."""
    count = 0
    for pid in _processes():
        for variable in _variables(pid):
            name, _, value = variable.decode(errors="replace").partition("=")
            if name == _MARK and not Path(f"/proc/{value.partition('.')[0]}").exists():
                _kill(pid)
                count += 1
    return count


def _environment(mark: str) -> dict[str, str]:
    name, _, value = mark.partition("=")
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]))
    return {
        # As titanlab's own ranks have it: fewer fragments at the memory's edge. The name changed in torch 2.10.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        **{key: value for key, value in os.environ.items() if key not in _FOREIGN},
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        name: value,
    }


def _end_marked(mark: str) -> None:
    """Kill every process with a mark that begins like this, until none is left."""
    for _ in range(100):
        pids = [pid for pid in _processes() if any(each.startswith(mark.encode()) for each in _variables(pid))]
        if not pids:
            return
        for pid in pids:
            _kill(pid)
        time.sleep(0.02)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _variables(pid: int) -> list[bytes]:
    """The environment that a process was started with; of one that has ended, or is another user's, nothing."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
