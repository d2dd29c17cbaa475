"""tracker=wandb: one writer process per run, so that wandb can neither stop nor slow down the training process."""

from __future__ import annotations

import collections
import contextlib
import json
import netrc
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from titanlab.errors import ConfigError, TitanlabError
from titanlab.system import finite, home, open_to_write
from titanlab.techniques.tracker.contract import REPLACED, Record, TrackedRun, Tracker, Warn, write_record
from titanlab.techniques.tracker.trackers_schema import Wandb
from titanlab.techniques.tracker.wandb_writer import IGNORED_SIGNALS

_ENV_MODES = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}


def resolve_mode(config: Wandb, environ: Mapping[str, str]) -> str:
    """`online`, `offline` or `off`."""
    mode = config.mode
    if mode == "auto":
        mode = _ENV_MODES.get(environ.get("WANDB_MODE", ""), "online")
    return "offline" if mode == "online" and not has_key(environ) else mode


def has_key(environ: Mapping[str, str]) -> bool:
    """Whether wandb can log in: with a key or an identity token in the environment, or with an entry in netrc."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    folder = environ.get("HOME") or home()
    usual = [] if folder is None else [Path(folder) / ".netrc", Path(folder) / "_netrc"]
    files = [Path(environ["NETRC"])] if environ.get("NETRC") else usual
    for path in files:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


FOLDER = "wandb"


def online_folders(run: Path, id: str) -> frozenset[Path]:  # noqa: A002
    """Folders of starts in online mode, whether or not wandb got online."""
    return frozenset((run / FOLDER).glob(f"run-*-{id}"))


def offline_files(run: Path) -> list[Path]:
    """Files of offline starts, oldest first."""
    return sorted((run / FOLDER).glob("offline-run-*/run-*.wandb"))


def is_uploaded(file: Path) -> bool:
    """Whether `wandb sync` has uploaded a file: it then makes a `.synced` file beside it."""
    return file.with_name(f"{file.name}.synced").exists()


def discard(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


_WRITER = "titanlab.techniques.tracker.wandb_writer"


class WandbTracker(Tracker):
    """The training process's side of the pipe to the writer, which runs `wandb_writer.py`.

    The training process never imports wandb: the import takes a second and holds the GIL, and wandb starts threads and
    waits for its service when the interpreter ends. The training process never waits either: rows that do not fit into
    the pipe wait in a bounded queue. If the writer dies, hangs or cannot log in, the user gets one warning, and
    attempts/N/tracker.json shows the missing rows. A writer that cannot get online is replaced by one that writes
    offline and gets all rows again.

    Each start has a folder in the run's folder, `wandb/[offline-]run-DATE-ID/` with the file `run-ID.wandb`.
    """

    _warn: Warn

    def __init__(self, config: Wandb) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._queue: collections.deque[bytes] = collections.deque()
        # Bytes of the queue's first line that are already in the pipe.
        self._written = 0
        # Lines sent to this writer; an offline writer that replaces it needs them again.
        self._sent: list[bytes] = []
        self._rows = 0
        self._received = b""
        self._events: set[str] = set()
        self._warned = False
        self._folder = Path()
        self._start: dict[str, Any] = {}
        self._others: frozenset[Path] = frozenset()

    def start(self, run: TrackedRun, *, warn: Warn) -> None:
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
        if self._process is None:
            return
        self._rows += 1
        if len(self._queue) >= self._config.queue_rows:
            self._warn_once("cannot keep up, so rows are left out of it; metrics.jsonl has them all")
        else:
            # wandb's name for the time at which a row was measured.
            timestamp = {} if time is None else {"_timestamp": time}
            self._queue.append(_line({"log": {"step": step, "metrics": {**metrics, **timestamp}}}))
        self._pump()

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """Send the summary, wait for the writer up to `finish_seconds`, and end it.

        If the writer is not online after half of that time, the run is written offline in the other half.
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
            writable = [_file(self._process.stdin)] if self._may_send else []
            select.select([_file(self._process.stdout)], writable, [], min(max(0.0, until - now), 0.5))
            self._pump()
        if self._process is not None:
            self._end(max(0.1, deadline - time.monotonic()))
            if late:
                self._warn_once(f"was not online before the end, so it has written offline; {self._cure('sync')}")

    def kept_files(self, run: Path) -> frozenset[Path]:
        return frozenset(path for path in (run / FOLDER).glob("*run-*-*") if path.is_dir() and not path.is_symlink())

    def put_aside(self, run: Path, paths: Iterable[Path], *, keep: bool) -> None:
        if not keep:
            discard(paths)
            return
        for folder in paths:
            aside = run / REPLACED / FOLDER
            aside.mkdir(parents=True, exist_ok=True)
            folder.rename(aside / folder.name)

    @property
    def _may_send(self) -> bool:
        return bool(self._queue) and ("started" in self._events or len(self._sent) < self._config.queue_rows)

    @property
    def _is_going_online(self) -> bool:
        return self._start["mode"] == "online" and "started" not in self._events

    def _launch(self) -> None:
        """Start a writer with the settings and the mode in `_start`."""
        record = Record(**self._start["record"]["values"])
        write_record(Path(self._start["record"]["path"]), record)
        self._received, self._events = b"", set()
        try:
            log_file = open_to_write(self._folder / "logs" / "wandb.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(log_file, "ab") as log, _blocked():
                self._process = subprocess.Popen(
                    # -P: nothing is imported from the working directory.
                    [sys.executable, "-P", "-m", _WRITER],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    # A separate process group, so that all processes of the writer can be killed together.
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
        # The first line is the start message of the old writer.
        rows = [*self._sent, *self._queue][1:]
        self._end(0.0)
        # The folder that wandb made for the online mode has only wandb's logs.
        discard(online_folders(self._folder, self._start["id"]) - self._others)
        self._queue.extend(rows)
        self._start["mode"] = "offline"
        self._launch()

    def _settings(self, run: TrackedRun, mode: str) -> dict[str, Any]:
        config = self._config
        # wandb accepts tags of 1 to 64 characters, without duplicates.
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
            # None: what wandb has under this id is replaced. An attempt from step 0 begins the run anew.
            "resume": "allow" if run.resumed_step else None,
            "config": run.flat_config(),
            # wandb monitors the memory and the devices of this process.
            "pid": os.getpid() if run.is_live else None,
            "record": {"path": str(run.record), "values": asdict(record)},
        }

    def _pump(self) -> None:
        """Write lines until the pipe is full and read the writer's events, without waiting."""
        process = self._process
        if process is None:
            return
        try:
            pipe = _file(process.stdin).fileno()
            while self._may_send:
                self._written += os.write(pipe, memoryview(self._queue[0])[self._written :])
                if self._written == len(self._queue[0]):
                    line, self._written = self._queue.popleft(), 0
                    if self._is_going_online:
                        self._sent.append(line)
        except BlockingIOError:
            pass
        except OSError:
            # The writer has closed the pipe. Its last event, if there is one, has the reason.
            self._read_events()
            if self._process is process:
                self._give_up("has ended by itself")
            return
        self._read_events()

    def _read_events(self) -> None:
        assert self._process is not None
        try:
            content = os.read(_file(self._process.stdout).fileno(), 65536)
        except BlockingIOError:
            return
        if not content:
            if "finished" not in self._events:
                self._give_up("has ended by itself")
            return
        *lines, self._received = (self._received + content).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                self._events.add(event["event"])
                if event["event"] == "started":
                    self._sent.clear()
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
        self._sent.clear()
        self._written = 0
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            # Closing flushes, but os.write leaves nothing in the buffer.
            with contextlib.suppress(OSError):
                _file(pipe).close()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            # The writer leads its own session, so its process group has no other processes. wandb's service is in
            # another group, and ends when the writer is gone.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Block the signals that a writer ignores, so that none can end it before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(message), default=str).encode() + b"\n"


def _file(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


_CONNECT_SECONDS = 2.0
_USUAL = "https://api.wandb.ai"


def lack(environ: Mapping[str, str] | None = None) -> ConfigError | None:
    """The reason why an upload would fail, no API key or no network; None if no reason is known."""
    environ = os.environ if environ is None else environ
    if not has_key(environ):
        cure = "make one known (`wandb login`, or WANDB_API_KEY), then titanlab sync"
        return ConfigError("WANDB_API_KEY", None, "no API key of wandb was found", cure)
    base = environ.get("WANDB_BASE_URL") or _USUAL
    # Behind a proxy, a direct connection says nothing about wandb's connection.
    if any(environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY")):
        return None
    try:
        url = urlsplit(base)
        port = url.port or (80 if url.scheme == "http" else 443)
        # Checked here, because wandb itself would retry for hours.
        socket.create_connection((url.hostname or "", port), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        cure = "call titanlab sync where there is a network, such as on a login node"
        return ConfigError("WANDB_BASE_URL", base, f"cannot be reached ({error})", cure)
    return None


def upload(runs: Sequence[Sequence[Path]]) -> None:
    """Upload the files of each run in their order; wandb prints to the terminal.

    wandb appends the rows of a file to those that it has under the same id. In one command it would order a run's files
    by the time at which they were begun, and clocks of hosts differ: so each command gets one file of each run.

    Raises:
        TitanlabError: wandb has not uploaded all files.
    """
    for turn in range(max(map(len, runs), default=0)):
        # If a file fails, the later ones of its run wait: wandb drops rows that come too late.
        files = [run[turn] for run in runs if turn < len(run) and all(map(is_uploaded, run[:turn]))]
        if files:
            # -P: nothing is imported from the working directory.
            command = [sys.executable, "-P", "-m", "wandb", "sync", "--include-online", *map(str, files)]
            subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    left = [file for run in runs for file in run if not is_uploaded(file)]
    if left:
        raise TitanlabError(f"wandb has not uploaded {left[0]}{f' and {len(left) - 1} more' if left[1:] else ''}")
