"""The process that logs to wandb: it reads messages from stdin and writes events to stdout, both as JSON lines.

    {"start": {...}}  {"log": {"step": 5, "metrics": {...}}}  …  {"finish": {"summary": {...}, "exit_code": 0}}

Events: `trouble` (with a text for the user), `finished`. All other output of this process and of wandb goes to
logs/wandb.log.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import queue
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlab.techniques.tracker.contract import FINISHED, OPEN, Record, write_record
from titanlab.techniques.tracker.wandb import IGNORED_SIGNALS, lack, online_folders

# On Linux, by `uname -m`: AUDIT_ARCH_* from linux/audit.h, and the number of the system call rt_sigaction.
_MACHINES = {"x86_64": (0xC000003E, 13), "aarch64": (0xC00000B7, 134)}
# linux/prctl.h and linux/seccomp.h.
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_ALLOW, _SUCCEED_WITHOUT_EFFECT = 0x7FFF0000, 0x00050000
# linux/bpf_common.h: load a word of struct seccomp_data, compare, return.
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# Offsets in struct seccomp_data; an argument's lower half on little-endian machines.
_CALL, _MACHINE, _FIRST, _SECOND = 0, 4, 16, 24


def ignore_signals(numbers: Sequence[int]) -> bool:
    """Ignore signals in this process and in every process that it starts from now on.

    Slurm and terminals send signals to every process of a run. This process and wandb's service, which it starts, end
    after the training process has closed the pipe or has died. Most programs keep a signal ignored that was ignored
    when they started. A Go program that calls `signal.Notify`, as wandb's service does, gets it nevertheless, and ends.
    A seccomp filter lets the system call that installs the handler succeed without effect. The filter can go when
    wandb's service has an option to ignore signals.

    Returns:
        whether this includes programs that install handlers: true on Linux if the kernel has seccomp.
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
    """Instructions with which rt_sigaction(number, action, …) has no effect unless the action is null."""
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
    """Serve one run."""
    ignore_signals(IGNORED_SIGNALS)
    # The parent has blocked these signals, so that none arrived before they were ignored.
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
            known = {name: value for name, value in message["log"]["metrics"].items() if value is not None}
            step = message["log"]["step"]
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
            known = {name: value for name, value in message["finish"]["summary"].items() if value is not None}
            run.summary.update(known)
            run.finish(exit_code=message["finish"]["exit_code"])
            write_record(path, replace(record, state=FINISHED, left_out=message["finish"]["rows"] - record.rows))
            return
    run.finish(exit_code=1)  # The training process has died.
    write_record(path, record)


def _open(start: dict[str, Any], send: Send) -> Any:
    """Start a run of wandb; if it cannot get online, the run is written offline."""
    if not os.environ.get("WANDB_MODE"):
        # wandb refuses to start if WANDB_MODE is empty.
        os.environ.pop("WANDB_MODE", None)
    import wandb

    if start["mode"] == "online":
        before = online_folders(Path(start["dir"]), start["id"])
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
        for folder in online_folders(Path(start["dir"]), start["id"]) - before:
            shutil.rmtree(folder, ignore_errors=True)
        send("trouble", f"could not go online ({refusal}), so it writes offline")
        start["mode"] = "offline"
    return _init(wandb, start)


def _init(wandb: Any, start: Mapping[str, Any]) -> Any:
    names = ("id", "name", "mode", "project", "entity", "group", "job_type", "tags", "dir", "config", "resume")
    return wandb.init(
        **{name: start[name] for name in names},
        settings=wandb.Settings(
            console="off",
            silent=True,
            init_timeout=_INIT_SECONDS,
            # wandb would record this process; env.json has the code and versions of the training process.
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
