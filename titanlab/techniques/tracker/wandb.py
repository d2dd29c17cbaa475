"""tracker=wandb: one writer process per run, so that wandb can neither stop nor slow down the training process."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import netrc
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
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


_WRITER = "titanlab.techniques.tracker.wandb_writer"
# Signals with which Slurm, torchrun and terminals ask a job to end or to save. SIGKILL cannot be ignored.
IGNORED_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTERM,
    signal.SIGXCPU,
)


class WandbTracker(Tracker):
    """The training process's side of the pipe to the writer, which runs `wandb_writer.py`.

    The training process never imports wandb: the import takes a second and holds the GIL, and wandb starts threads and
    waits for its service when the interpreter ends. The training process never waits either: rows wait in a bounded
    queue, and a thread writes them into the pipe. If the writer dies or hangs, the user gets one warning, and
    attempts/N/tracker.json shows the missing rows.

    Each start has a folder in the run's folder, `wandb/[offline-]run-DATE-ID/` with the file `run-ID.wandb`.
    """

    _warn: Warn

    def __init__(self, config: Wandb) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        # Lines for the writer; None: the end.
        self._lines: queue.Queue[bytes | None] = queue.Queue(config.queue_rows)
        self._rows = 0
        # Set by the thread that reads the writer's events: warnings, and whether the writer has closed its run and
        # ended.
        self._troubles: collections.deque[str] = collections.deque()
        self._has_finished = False
        self._ended = threading.Event()
        self._warned = False
        self._folder = Path()

    def start(self, run: TrackedRun, *, warn: Warn) -> None:
        self._warn = warn
        mode = resolve_mode(self._config, os.environ)
        if mode == "off":
            return
        if self._config.mode == "online" and mode == "offline":
            self._warn_once("no API key was found, so it writes offline; `wandb login` makes one known")
        self._folder = run.folder
        record = Record(kind="wandb", id=run.id, wanted=mode, attempt=run.attempt)
        write_record(run.record, record)
        try:
            log_file = open_to_write(run.folder / "logs" / "wandb.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(log_file, "ab") as log, _blocked():
                process = self._process = subprocess.Popen(
                    # -P: nothing is imported from the working directory.
                    [sys.executable, "-P", "-m", _WRITER],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    # A separate process group, so that all processes of the writer can be killed together.
                    start_new_session=True,
                )
        except OSError as error:
            self._give_up(f"could not start ({error})")
            return
        self._lines.put(_line({"start": self._settings(run, mode, record)}))
        for target, pipe in ((self._send, process.stdin), (self._listen, process.stdout)):
            threading.Thread(target=target, args=[pipe], name="wandb", daemon=True).start()

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        self._report()
        if self._process is None:
            return
        self._rows += 1
        # wandb's name for the time at which a row was measured.
        timestamp = {} if time is None else {"_timestamp": time}
        try:
            self._lines.put_nowait(_line({"log": {"step": step, "metrics": {**metrics, **timestamp}}}))
        except queue.Full:
            self._warn_once("cannot keep up, so rows are left out of it; metrics.jsonl has them all")

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """Send the summary, wait for the writer up to `finish_seconds`, and end it."""
        self._report()
        if self._process is None:
            return
        deadline = time.monotonic() + self._config.finish_seconds
        message = {"summary": dict(summary), "exit_code": exit_code, "rows": self._rows}
        with contextlib.suppress(queue.Full):
            # The pipe stays open: at its end the writer would take this process for dead, and limit its own time.
            self._lines.put(_line({"finish": message}), timeout=self._config.finish_seconds)
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            self._give_up(f"took longer than {self._config.finish_seconds:g} s to finish")
        self._report()

    def kept_files(self, run: Path) -> frozenset[Path]:
        return frozenset(path for path in (run / FOLDER).glob("*run-*-*") if path.is_dir() and not path.is_symlink())

    def put_aside(self, run: Path, paths: Iterable[Path], *, keep: bool) -> None:
        for folder in paths:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            aside = run / REPLACED / FOLDER
            aside.mkdir(parents=True, exist_ok=True)
            folder.rename(aside / folder.name)

    def _settings(self, run: TrackedRun, mode: str, record: Record) -> dict[str, Any]:
        config = self._config
        # wandb accepts tags of 1 to 64 characters, without duplicates.
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
            # None: an attempt from step 0 replaces what wandb has under this id.
            "resume": "allow" if run.resumed_step else None,
            "config": run.flat_config(),
            # wandb monitors the memory and the devices of this process.
            "pid": os.getpid() if run.is_live else None,
            "record": {"path": str(run.record), "values": asdict(record)},
        }

    def _send(self, pipe: IO[bytes]) -> None:
        """Write the lines into the pipe until the writer ends, and close the pipe."""
        with contextlib.suppress(OSError), pipe:
            for line in iter(self._lines.get, None):
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(pipe.fileno(), rest) :]

    def _listen(self, pipe: IO[bytes]) -> None:
        """Read the writer's events until it closes the pipe."""
        with io.BufferedReader(pipe) as lines:  # type: ignore[type-var]
            for line in lines:
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    self._has_finished |= event["event"] == "finished"
                    if event["event"] == "trouble":
                        self._troubles.append(event["text"])
        self._ended.set()

    def _report(self) -> None:
        """Show the writer's warnings, and stop when the writer has ended."""
        while self._troubles:
            self._warn_once(self._troubles.popleft())
        if self._process is not None and self._ended.is_set():
            if self._has_finished:
                self._process.wait()
                self._process = None
                # Let the sending thread end.
                self._lines.put(None)
            else:
                self._give_up("has ended by itself")

    def _give_up(self, reason: str) -> None:
        self._warn_once(
            f"{reason}; metrics.jsonl has everything, {self._folder / 'logs' / 'wandb.log'} what happened; "
            f"next: titanlab sync --rebuild {self._folder}"
        )
        process, self._process = self._process, None
        if process is not None:
            # The writer leads its own session, so its process group has no other processes. wandb's service is in
            # another group, and ends when the writer is gone.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # Let the sending thread end.
        with contextlib.suppress(queue.Empty):
            while True:
                self._lines.get_nowait()
        self._lines.put(None)

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"wandb: {text}")


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

    wandb appends the rows of a file to the rows under the same id. In one command it would sort a run's files by start
    time, but the clocks of hosts differ: so each command gets one file of each run.

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
