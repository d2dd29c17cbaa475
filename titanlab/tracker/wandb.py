"""tracker=wandb: one writer per run, in a process of its own, so that wandb can neither stop nor slow a run.

The training process never imports wandb, which takes a second and holds the interpreter's lock, starts
threads and waits for its service when the interpreter ends. It sends rows down a pipe that is never waited
for: what the pipe does not take waits in a bounded queue. A writer that dies, hangs or cannot log in costs
one warning. `wandb_writer.py` is the other end.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import netrc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from titanlab.atomic_file import finite
from titanlab.errors import ConfigError
from titanlab.tracker.protocol import TrackedRun, Warn
from titanlab.tracker.wandb_schema import Wandb

_WRITER = Path(__file__).with_name("wandb_writer.py")
_ENV_MODES = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}


class WandbTracker:
    """The training process's end of the pipe."""

    def __init__(self, config: Wandb, warn: Warn) -> None:
        self._config = config
        self._warn = warn
        self._process: subprocess.Popen[bytes] | None = None
        self._queue: collections.deque[bytes] = collections.deque()
        self._heard = b""
        self._events: set[str] = set()
        self._warned = False
        self._folder = Path()

    def start(self, run: TrackedRun) -> None:
        """Start the writer; it imports and opens wandb while the run goes on."""
        mode = resolve_mode(self._config, os.environ)
        if mode == "off":
            return
        if self._config.mode == "online" and mode == "offline":
            self._warn_once("no API key was found, so it writes offline; `wandb login` makes one known")
        self._folder = run.folder
        try:
            with (run.folder / "logs" / "wandb.log").open("ab") as log:
                self._process = subprocess.Popen(
                    # -P: or `import wandb` would find the file beside the writer.
                    [sys.executable, "-P", str(_WRITER)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    # Ctrl-C is for the run, which then closes the writer in order.
                    start_new_session=True,
                )
            os.set_blocking(_file(self._process.stdin).fileno(), False)
            os.set_blocking(_file(self._process.stdout).fileno(), False)
        except OSError as error:
            self._give_up(f"could not start ({error})")
            return
        self._send({"start": self._settings(run, mode)})

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Put a row into the pipe, or into the queue where that is full."""
        self._send({"log": {"step": step, "metrics": dict(metrics)}})

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """Send the summary, wait for the writer up to `finish_seconds`, and end it."""
        deadline = time.monotonic() + self._config.finish_seconds
        self._send({"finish": {"summary": dict(summary), "exit_code": exit_code}}, always=True)
        while self._process is not None and "finished" not in self._events:
            left = deadline - time.monotonic()
            if left <= 0:
                self._give_up(f"took longer than {self._config.finish_seconds:g} s to finish")
                return
            writable = [_file(self._process.stdin)] if self._queue else []
            select.select([_file(self._process.stdout)], writable, [], min(left, 0.5))
            self._pump()
        if self._process is not None:
            self._end(max(0.1, deadline - time.monotonic()))

    def _settings(self, run: TrackedRun, mode: str) -> dict[str, Any]:
        config = self._config
        # wandb takes tags of 1 to 64 characters and none twice.
        tags = list(dict.fromkeys(tag[:64] for tag in [*run.tags, *config.tags] if tag))
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
            # Whose memory and devices wandb watches.
            "pid": os.getpid(),
        }

    def _send(self, message: Mapping[str, Any], *, always: bool = False) -> None:
        if self._process is None:
            return
        if len(self._queue) >= self._config.queue_rows and not always:
            self._warn_once("cannot keep up, so rows are left out of it; metrics.jsonl has them all")
        else:
            self._queue.append(json.dumps(finite(message), default=str).encode() + b"\n")
        self._pump()

    def _pump(self) -> None:
        """Write what the pipe takes and read what the writer has said, without waiting."""
        if self._process is None:
            return
        try:
            pipe = _file(self._process.stdin).fileno()
            while self._queue:
                written = os.write(pipe, self._queue[0])
                if written < len(self._queue[0]):
                    self._queue[0] = self._queue[0][written:]
                else:
                    self._queue.popleft()
        except BlockingIOError:
            pass
        except OSError:
            # Nobody reads. It may have said why, and what it said is what a person should hear.
            self._listen()
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
                if event["event"] == "trouble":
                    self._warn_once(event["text"])

    def _give_up(self, reason: str) -> None:
        self._warn_once(f"{reason}; metrics.jsonl has everything, {self._folder / 'logs' / 'wandb.log'} what happened")
        self._end(0.0)

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"wandb: {text}")

    def _end(self, seconds: float) -> None:
        """Close the pipe, give the writer some time to go, then end it with all that it has started."""
        process, self._process = self._process, None
        self._queue.clear()
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            # Closing also flushes; there is nothing to flush, for we write past the buffer.
            with contextlib.suppress(OSError):
                _file(pipe).close()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            # The writer leads a session of its own, so that the group is the writer's alone.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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


def check(config: Wandb) -> None:
    """Hold this environment to have what the tracker needs.

    Raises:
        ConfigError: wandb is not installed.
    """
    if config.mode != "off" and importlib.util.find_spec("wandb") is None:
        raise ConfigError("tracker", "wandb", "the package is not installed", "pip install wandb, or try tracker=jsonl")


def build(config: Wandb, *, warn: Warn) -> WandbTracker:
    """The tracker that `config` describes.

    Raises:
        ConfigError: wandb is not installed.
    """
    check(config)
    return WandbTracker(config, warn)


def _file(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
