"""tracker=wandb: one writer process per run, so that wandb can neither stop nor slow down the training process.

`python -m titanlab.techniques.tracker.wandb` is the writer: it reads messages from stdin and writes events to stdout,
both as JSON lines.

    {"start": {...}}  {"log": {"step": 5, "metrics": {...}}}  …  {"finish": {"summary": {...}, "exit_code": 0}}

Events: `trouble` (with a text for the user), `finished`. All other output of the writer and of wandb goes to
logs/wandb.log.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import io
import json
import netrc
import os
import platform
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from titanlab.errors import ConfigError, TitanlabError
from titanlab.system import finite, home, open_to_write
from titanlab.techniques.tracker.contract import (
    FINISHED,
    OPEN,
    REPLACED,
    Record,
    TrackedRun,
    Tracker,
    Warn,
    write_record,
)
from titanlab.techniques.tracker.trackers_schema import Wandb

_USUAL = "https://api.wandb.ai"
_ENV_MODES = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}


def resolve_mode(config: Wandb, environ: Mapping[str, str]) -> str:
    """The mode in which wandb runs: `online`, `offline`, `at_end` or `off`."""
    mode = config.mode
    if mode == "auto":
        mode = _ENV_MODES.get(environ.get("WANDB_MODE", ""), "online")
    return "offline" if mode == "online" and not has_key(environ) else mode


def has_key(environ: Mapping[str, str]) -> bool:
    """Whether wandb can log in: with a key or an identity token in the environment, or with an entry in netrc."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or _USUAL).netloc
    folder = Path(environ.get("HOME") or home() or "/")
    named = environ.get("NETRC")
    for path in [named] if named else [folder / ".netrc", folder / "_netrc"]:
        with contextlib.suppress(OSError, UnicodeDecodeError, netrc.NetrcParseError):
            if netrc.netrc(path).authenticators(host):
                return True
    return False


FOLDER = "wandb"


def offline_files(run: Path) -> list[Path]:
    """Files of the starts in wandb's offline mode, oldest first."""
    return sorted((run / FOLDER).glob("offline-run-*/run-*.wandb"))


def is_uploaded(file: Path) -> bool:
    """Whether `wandb sync` has uploaded a file: it then makes a `.synced` file beside it."""
    return file.with_name(f"{file.name}.synced").exists()


_WRITER = "titanlab.techniques.tracker.wandb"
# With these signals Slurm, torchrun and terminals ask a job to end or to save. SIGKILL cannot be ignored.
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
    """The training process's side of the pipe to the writer.

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
        if mode in ("off", "at_end"):
            return
        if self._config.mode == "online" and mode == "offline":
            self._warn_once("no API key was found, so it writes offline; `wandb login` makes one known")
        self._folder = run.folder
        record = Record(kind="wandb", id=run.id, wanted=mode, attempt=run.attempt)
        write_record(run.record, record)
        # Block the signals that the writer ignores, so that none can end it before it ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            log_file = open_to_write(run.folder / "logs" / "wandb.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(log_file, "ab") as log:
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
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # wandb accepts tags of 1 to 64 characters, without duplicates.
        tags = list(dict.fromkeys(tag[:64] for tag in [*run.tags, *self._config.tags] if tag))
        start = {
            "id": run.id,
            "name": run.name,
            "mode": mode,
            "project": self._config.project or os.environ.get("WANDB_PROJECT") or "titanlab",
            "entity": self._config.entity,
            "group": self._config.group or run.sweep,
            "job_type": run.job_type,
            "tags": tags,
            "notes": run.notes,
            "dir": str(run.folder),
            # None: an attempt from step 0 replaces what wandb has under this id.
            "resume": "allow" if run.resumed_step else None,
            "config": run.flat_config(),
            # wandb monitors the memory and the devices of this process.
            "pid": os.getpid() if run.is_live else None,
            "record": {"path": str(run.record), "values": asdict(record)},
        }
        self._lines.put(_line({"start": start}))
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
            # Do not close the pipe: the writer would take this process for dead, and limit its own time.
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


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(message), default=str).encode() + b"\n"


_CONNECT_SECONDS = 2.0


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


# The rest of this file runs in the writer's process.

# By `uname -m` of Linux: AUDIT_ARCH_* from linux/audit.h, and the number of the system call rt_sigaction.
_MACHINES = {"x86_64": (0xC000003E, 13), "aarch64": (0xC00000B7, 134)}
# linux/prctl.h and linux/seccomp.h.
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_ALLOW, _SUCCEED_WITHOUT_EFFECT = 0x7FFF0000, 0x00050000
# linux/bpf_common.h: load a word of struct seccomp_data, compare, return.
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Offsets in struct seccomp_data; of the first two arguments, the offset of the lower half (little-endian).
_CALL, _MACHINE, _FIRST, _SECOND = 0, 4, 16, 24


def ignore_signals(numbers: Sequence[int]) -> bool:
    """Ignore signals in this process and in every process that it starts from now on.

    Slurm and terminals send signals to every process of a run. This process and wandb's service, which it starts, must
    live until the training process has closed the pipe or has died. Most programs keep ignoring a signal that was
    ignored when they started. A Go program that calls `signal.Notify`, as wandb's service does, gets the signal
    nevertheless, and ends. So a seccomp filter lets the system call that installs the handler succeed without effect.
    The filter can go when wandb's service has an option to ignore signals.

    Returns:
        whether programs that install handlers are included: true on Linux if the kernel has seccomp.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    machine = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None or sys.byteorder != "little":
        return False
    instructions = _filter(*machine, numbers)
    buffer = ctypes.create_string_buffer(instructions)
    # struct sock_fprog: a count and a pointer.
    program = ctypes.create_string_buffer(struct.pack("@HP", len(instructions) // 8, ctypes.addressof(buffer)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # Without NO_NEW_PRIVS only root may set a filter. It disables setuid bits; no setuid program is started here.
    ulong = ctypes.c_ulong
    if prctl(_PR_SET_NO_NEW_PRIVS, ulong(1), ulong(0), ulong(0), ulong(0)) != 0:
        return False
    return bool(prctl(_PR_SET_SECCOMP, ulong(_SECCOMP_MODE_FILTER), program) == 0)


def _filter(machine: int, call: int, numbers: Sequence[int]) -> bytes:
    """A seccomp filter: for signals in `numbers`, rt_sigaction(number, action, …) only has effect if action is null."""
    count = len(numbers)
    # Code, steps to skip if equal, steps to skip otherwise, value; the last two steps return.
    steps = [
        (_LOAD, 0, 0, _MACHINE),
        (_IF_EQUAL, 0, count + 5, machine),
        (_LOAD, 0, 0, _CALL),
        (_IF_EQUAL, 0, count + 3, call),
        # A null action only reads the current handler.
        (_LOAD, 0, 0, _SECOND),
        (_IF_EQUAL, count + 1, 0, 0),
        (_LOAD, 0, 0, _FIRST),
        *((_IF_EQUAL, count - place, 0, int(number)) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _SUCCEED_WITHOUT_EFFECT),
    ]
    # struct sock_filter.
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


# Time for uploads after the training process has died.
_ORPHAN_SECONDS = 60.0
_INIT_SECONDS = 60.0
_MOST_ROWS = 50_000
# wandb's name for the time of a row; without it, wandb uses the current time.
_TIMESTAMP = "_timestamp"
# The least time between two writes of tracker.json while rows come.
_RECORD_SECONDS = 5.0
Send = Callable[..., None]


def main() -> None:
    """Write one run: start, rows and end are messages on stdin."""
    ignore_signals(IGNORED_SIGNALS)
    # The parent has blocked these signals.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # Output of libraries must not be mixed with the events.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(event: str, text: str = "") -> None:
        # Without the training process there is no reader; _ORPHAN_SECONDS then limits the time of this process.
        with contextlib.suppress(OSError):
            events.write(json.dumps({"event": event, "text": text}) + "\n")
            events.flush()

    try:
        _serve(_messages(), send)
    except BaseException as error:
        traceback.print_exc()
        send("trouble", f"stopped ({_first_line(error)}); metrics.jsonl goes on")
        _leave(1)
    send("finished")
    _leave(0)


def _serve(messages: queue.SimpleQueue[dict[str, Any] | None], send: Send) -> None:
    first = messages.get()
    if first is None:
        return
    start = first["start"]
    run = _open(start, send)
    path = Path(start["record"]["path"])
    # `run.dir` is the `files/` folder inside wandb's folder of the run.
    folder = os.path.relpath(Path(run.dir).parent, start["dir"])
    record = Record(**{**start["record"]["values"], "state": OPEN, "mode": start["mode"], "folder": folder})
    write_record(path, record)
    written = time.monotonic()
    timestamp: dict[str, Any] = {}
    while (message := messages.get()) is not None:
        if "log" in message:
            known, step = _known(message["log"]["metrics"]), message["log"]["step"]
            timestamp = {name: known[name] for name in (_TIMESTAMP,) if name in known}
            run.log(known, step=step)
            record = replace(record, step=step, rows=record.rows + 1)
            if time.monotonic() - written >= _RECORD_SECONDS:
                write_record(path, record)
                written = time.monotonic()
        if "finish" in message:
            # wandb uses the last row as the summary. It delays that row until a later step or the end, and would then
            # overwrite the summary that is set here; so the row is committed first.
            if record.step is not None:
                run.log(timestamp, step=record.step, commit=True)
            run.summary.update(_known(message["finish"]["summary"]))
            run.finish(exit_code=message["finish"]["exit_code"])
            write_record(path, replace(record, state=FINISHED, left_out=message["finish"]["rows"] - record.rows))
            return
    run.finish(exit_code=1)  # The training process has died.
    write_record(path, record)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _open(start: dict[str, Any], send: Send) -> Any:
    """Start a run of wandb; if wandb cannot connect, write the run offline."""
    # `start` has the mode. wandb refuses to start if WANDB_MODE is set but empty.
    os.environ.pop("WANDB_MODE", None)
    import wandb

    if start["mode"] == "online":
        # wandb makes a folder `run-DATE-ID` for each start in online mode, even if it cannot connect.
        folders, pattern = Path(start["dir"], FOLDER), f"run-*-{start['id']}"
        before = set(folders.glob(pattern))
        # Checked here, because wandb itself tries for over a minute.
        refusal = None if (known := lack()) is None else known.rule
        if refusal is None:
            try:
                return _init(wandb, start)
            except Exception as error:
                traceback.print_exc()
                refusal = _first_line(error)
                # wandb's service keeps the run's id reserved while it tries to connect.
                wandb.teardown()
        # The folder that wandb made for the online mode has only wandb's logs.
        for folder in set(folders.glob(pattern)) - before:
            shutil.rmtree(folder, ignore_errors=True)
        send("trouble", f"could not go online ({refusal}), so it writes offline")
        start["mode"] = "offline"
    return _init(wandb, start)


def _init(wandb: Any, start: Mapping[str, Any]) -> Any:
    if start["mode"] == "offline":
        # Nothing leaves the machine, also no report of an error to wandb.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    names = ("id", "name", "mode", "project", "entity", "group", "job_type", "tags", "notes", "dir", "config", "resume")
    return wandb.init(
        **{name: start[name] for name in names},
        settings=wandb.Settings(
            console="off",
            silent=True,
            init_timeout=_INIT_SECONDS,
            # wandb would record the writer's code and packages; env.json has those of the training process.
            disable_git=True,
            save_code=False,
            x_save_requirements=False,
            **({"x_disable_stats": True} if start["pid"] is None else {"x_stats_pid": start["pid"]}),
        ),
    )


def _messages() -> queue.SimpleQueue[dict[str, Any] | None]:
    """Messages from the pipe, None at its end; a thread reads them, so that the end is noticed while wandb hangs."""
    messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            try:
                message = json.loads(line)
            except ValueError:
                break  # The training process has died while it wrote this line.
            # While wandb hangs, further rows are dropped, but reading continues to notice the end.
            if "log" not in message or messages.qsize() < _MOST_ROWS:
                messages.put(message)
        messages.put(None)
        timer = threading.Timer(_ORPHAN_SECONDS, lambda: os.killpg(0, signal.SIGKILL))
        timer.daemon = True
        timer.start()

    threading.Thread(target=read, daemon=True).start()
    return messages


def _leave(code: int) -> None:
    """End the process without wandb's exit hooks, which may wait for a network."""
    # Flush what wandb has printed: standard output is the log file here.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    main()
