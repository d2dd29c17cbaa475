"""tracker=wandb: one writer per run, in a process of its own, so that wandb can neither stop nor slow a run.

The training process never imports wandb, which takes a second and holds the interpreter's lock, starts
threads and waits for its service when the interpreter ends. It sends rows through a pipe and never waits for it:
what the pipe does not take waits in a bounded queue. A writer that dies, hangs or cannot log in costs one warning,
and attempts/N/tracker.json shows what it lacks. One that cannot get online is replaced by one that writes
offline, and gets all rows again. `wandb_writer.py` is the other end.
"""

from __future__ import annotations

import collections
import contextlib
import json
import netrc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from titanlab.system.atomic_file import finite
from titanlab.tracker.contract import Tracker, Warn
from titanlab.tracker.record import Record, write_record
from titanlab.tracker.tracked_run import TrackedRun
from titanlab.tracker.wandb_files import discard, kept_files, online_folders, put_aside
from titanlab.tracker.wandb_schema import Wandb
from titanlab.tracker.wandb_writer import UNHEARD

_WRITER = "titanlab.tracker.wandb_writer"
_ENV_MODES = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}


class WandbTracker(Tracker):
    """The training process's end of the pipe."""

    _warn: Warn

    def __init__(self, config: Wandb) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._queue: collections.deque[bytes] = collections.deque()
        # Bytes of the queue's first line that are already written to the pipe.
        self._begun = 0
        # Rows sent to this writer; an offline writer that replaces it needs them again.
        self._given: list[bytes] = []
        self._rows = 0
        self._heard = b""
        self._events: set[str] = set()
        self._warned = False
        self._folder = Path()
        self._start: dict[str, Any] = {}
        self._others: frozenset[Path] = frozenset()

    def start(self, run: TrackedRun, *, warn: Warn) -> None:
        """Start the writer; it imports and opens wandb while the run goes on."""
        self._warn = warn
        mode = resolve_mode(self._config, os.environ)
        if mode == "off":
            return
        if self._config.mode == "online" and mode == "offline":
            self._warn_once("no API key was found, so it writes offline; `wandb login` makes one known")
        self._folder = run.folder
        self._start = self._settings(run, mode)
        self._others = online_folders(run.folder, run.id)
        self._launch()

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """Put a row into the pipe, or into the queue where that is full."""
        if self._process is None:
            return
        self._rows += 1
        if len(self._queue) >= self._config.queue_rows:
            self._warn_once("cannot keep up, so rows are left out of it; metrics.jsonl has them all")
        else:
            # wandb's own name for when a row was measured.
            told = {} if time is None else {"_timestamp": time}
            self._queue.append(_line({"log": {"step": step, "metrics": {**metrics, **told}}}))
        self._pump()

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """Send the summary, wait for the writer up to `finish_seconds`, and end it.

        One that has not got online in half of that time writes offline in the other half.
        """
        begin = time.monotonic()
        deadline = begin + self._config.finish_seconds
        self._pump()
        if self._process is None:
            return
        self._queue.append(_line({"finish": {"summary": dict(summary), "exit_code": exit_code, "rows": self._rows}}))
        self._pump()
        late = False
        while self._process is not None and "finished" not in self._events:
            now = time.monotonic()
            if now >= deadline:
                self._give_up(f"took longer than {self._config.finish_seconds:g} s to finish")
                return
            half = begin + self._config.finish_seconds / 2
            if self._is_going_online and now >= half:
                late = True
                self._go_offline()
                continue
            until = min(deadline, half) if self._is_going_online else deadline
            writable = [_file(self._process.stdin)] if self._may_give else []
            select.select([_file(self._process.stdout)], writable, [], min(max(0.0, until - now), 0.5))
            self._pump()
        if self._process is not None:
            self._end(max(0.1, deadline - time.monotonic()))
            if late:
                self._warn_once(f"was not online before the end, so it has written offline; {self._cure('sync')}")

    def kept_files(self, run: Path) -> frozenset[Path]:
        """Folders of all starts."""
        return kept_files(run)

    def put_aside(self, run: Path, paths: Iterable[Path], *, keep: bool) -> None:
        """Move folders of starts to `replaced/wandb/`, or remove them."""
        put_aside(run, paths, keep=keep)

    @property
    def _is_ready(self) -> bool:
        return "started" in self._events

    @property
    def _may_give(self) -> bool:
        """Whether a line waits that may be sent now."""
        return bool(self._queue) and (self._is_ready or len(self._given) < self._config.queue_rows)

    @property
    def _is_going_online(self) -> bool:
        return self._start["mode"] == "online" and not self._is_ready

    def _launch(self) -> None:
        """Start a writer in the mode that `_start` says."""
        record = Record(**self._start["record"]["values"])
        write_record(Path(self._start["record"]["path"]), record)
        self._heard, self._events = b"", set()
        try:
            with (self._folder / "logs" / "wandb.log").open("ab") as log, _blocked():
                self._process = subprocess.Popen(
                    # -P: nothing is imported from the working directory.
                    [sys.executable, "-P", "-m", _WRITER],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    # A group of its own, so that all its processes can be ended together.
                    start_new_session=True,
                )
            os.set_blocking(_file(self._process.stdin).fileno(), False)
            os.set_blocking(_file(self._process.stdout).fileno(), False)
        except OSError as error:
            self._give_up(f"could not start ({error})")
            return
        self._queue.appendleft(_line({"start": self._start}))
        self._pump()

    def _go_offline(self) -> None:
        """Replace a writer that cannot get online by an offline one, and send it all rows again."""
        # The first line is the message that started that one.
        rows = [*self._given, *self._queue][1:]
        self._end(0.0)
        # The folder that wandb made for going online holds nothing but wandb's logs.
        discard(online_folders(self._folder, self._start["id"]) - self._others)
        self._queue.extend(rows)
        self._start["mode"] = "offline"
        self._launch()

    def _settings(self, run: TrackedRun, mode: str) -> dict[str, Any]:
        config = self._config
        # wandb takes tags of 1 to 64 characters and none twice.
        tags = list(dict.fromkeys(tag[:64] for tag in [*run.tags, *config.tags] if tag))
        record = Record(kind="wandb", id=run.id, wanted=mode, attempt=run.attempt)
        return {
            "id": run.id,
            "name": run.name,
            "mode": mode,
            "project": config.project or os.environ.get("WANDB_PROJECT") or "titanlab",
            "entity": config.entity,
            "group": config.group or run.sweep,
            "job_type": run.job_type,
            "tags": tags,
            "dir": str(run.folder),
            "config": run.flat_config(),
            # The process whose memory and devices wandb watches.
            "pid": os.getpid() if run.is_live else None,
            "record": {"path": str(run.record), "values": asdict(record)},
        }

    def _pump(self) -> None:
        """Write what the pipe takes and read what the writer has said, without waiting."""
        process = self._process
        if process is None:
            return
        try:
            pipe = _file(process.stdin).fileno()
            while self._may_give:
                self._begun += os.write(pipe, memoryview(self._queue[0])[self._begun :])
                if self._begun == len(self._queue[0]):
                    line, self._begun = self._queue.popleft(), 0
                    if self._is_going_online:
                        self._given.append(line)
        except BlockingIOError:
            pass
        except OSError:
            # The writer has closed the pipe. Its own message, if there is one, says why.
            self._listen()
            if self._process is process:
                self._give_up("has ended by itself")
            return
        self._listen()

    def _listen(self) -> None:
        assert self._process is not None
        try:
            heard = os.read(_file(self._process.stdout).fileno(), 65536)
        except BlockingIOError:
            return
        if not heard:
            if "finished" not in self._events:
                self._give_up("has ended by itself")
            return
        *lines, self._heard = (self._heard + heard).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                self._events.add(event["event"])
                if event["event"] == "started":
                    self._given.clear()
                if event["event"] == "trouble":
                    self._warn_once(event["text"])
                if event["event"] == "refused":
                    self._warn_once(f"could not go online ({event['text']}), so it writes offline")
                    self._go_offline()
                    return

    def _give_up(self, reason: str) -> None:
        self._warn_once(
            f"{reason}; metrics.jsonl has everything, {self._folder / 'logs' / 'wandb.log'} what happened; "
            f"{self._cure('sync --rebuild')}"
        )
        self._end(0.0)

    def _cure(self, verb: str) -> str:
        return f"next: titanlab {verb} {self._folder}"

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"wandb: {text}")

    def _end(self, seconds: float) -> None:
        """Close the pipe, give the writer some time to exit, then kill its process group."""
        process, self._process = self._process, None
        self._queue.clear()
        self._given.clear()
        self._begun = 0
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            # Closing also flushes; nothing is buffered, since os.write is used.
            with contextlib.suppress(OSError):
                _file(pipe).close()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            # The writer leads its own session, so that the group is the writer's alone. wandb's service has
            # another one, and ends when it sees that the writer is gone.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Block signals that a writer ignores: it starts with them blocked, and then ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(message), default=str).encode() + b"\n"


def resolve_mode(config: Wandb, environ: Mapping[str, str]) -> str:
    """`online`, `offline` or `off`."""
    mode = config.mode
    if mode == "auto":
        mode = _ENV_MODES.get(environ.get("WANDB_MODE", ""), "online")
    return "offline" if mode == "online" and not has_key(environ) else mode


def has_key(environ: Mapping[str, str]) -> bool:
    """Whether wandb would find a way to log in: a key or an identity token in the environment, or a line in netrc."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    home = Path(environ.get("HOME") or Path.home())
    files = [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for path in files:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _file(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
