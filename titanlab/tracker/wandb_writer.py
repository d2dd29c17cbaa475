"""The process that talks to wandb: messages as JSON lines on standard input, events on standard output.

A training process starts it as `python -m titanlab.tracker.wandb_writer` and never imports it:

    {"start": {...}}  {"log": {"step": 5, "metrics": {...}}}  …  {"finish": {"summary": {...}, "exit_code": 0}}

Events: `started`, `refused` (it cannot go online; the process ends), `trouble` (with a text for people), `finished`.
Everything else that it or wandb prints goes to logs/wandb.log. How far it got stands in attempts/N/tracker.json.

Slurm and terminals signal every process of a run at once. This one, and wandb's service that it starts, hear nothing of
that: they end when the training process has closed the pipe, or after it has gone without a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlab.tracker.record import FINISHED, OPEN, Record, write_record
from titanlab.tracker.signal_filter import ignore_for_good

# Signals by which Slurm, torchrun and terminals ask a job to end or to save. SIGKILL cannot be ignored.
UNHEARD = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTERM,
    signal.SIGXCPU,
)
# Time for uploads after the run's process has died.
_ORPHAN_SECONDS = 60.0
_INIT_SECONDS = 60.0
_ROWS = 50_000
# wandb's name for the time of a row; without it, wandb uses the current time.
_TIMESTAMP = "_timestamp"
# How often tracker.json is written while rows come.
_RECORD_SECONDS = 5.0
Tell = Callable[..., None]


def main() -> None:
    """Serve one run."""
    ignore_for_good(UNHEARD)
    # The parent has blocked them, so that none arrived before they were ignored.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # Output of libraries must not be mixed with the events.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(event: str, text: str = "") -> None:
        # If the run's process is gone, nobody reads; the limit for orphans applies.
        with contextlib.suppress(OSError):
            events.write(json.dumps({"event": event, "text": text}) + "\n")
            events.flush()

    try:
        _serve(_messages(), tell)
    except BaseException as error:
        traceback.print_exc()
        tell("trouble", f"stopped ({_first_line(error)}); metrics.jsonl goes on")
        _leave(1)
    tell("finished")
    _leave(0)


def _serve(messages: queue.SimpleQueue[dict[str, Any] | None], tell: Tell) -> None:
    first = messages.get()
    if first is None:
        return
    start = first["start"]
    run = _open(start, tell)
    book = _Book(start, run)
    tell("started")
    step: int | None = None
    moment: dict[str, Any] = {}
    while True:
        message = messages.get()
        if message is None:
            run.finish(exit_code=1)  # The process that trained has died.
            book.write()
            return
        if "log" in message:
            known = {name: value for name, value in message["log"]["metrics"].items() if value is not None}
            step = message["log"]["step"]
            moment = {name: known[name] for name in (_TIMESTAMP,) if name in known}
            run.log(known, step=step)
            book.count(step)
        if "finish" in message:
            # Over the last values, which wandb takes for the summary unasked. It holds the last row back until a later
            # step comes, or the end, when the row's values would go over ours.
            if step is not None:
                run.log(moment, step=step, commit=True)
            known = {name: value for name, value in message["finish"]["summary"].items() if value is not None}
            run.summary.update(known)
            run.finish(exit_code=message["finish"]["exit_code"])
            book.close(message["finish"]["rows"])
            return


class _Book:
    """Keeps tracker.json: what wandb has taken."""

    def __init__(self, start: Mapping[str, Any], run: Any) -> None:
        self._path = Path(start["record"]["path"])
        self._record = Record(**start["record"]["values"])
        self._written = 0.0
        # Which wandb calls its directory is `files/` in that of the attempt.
        folder = os.path.relpath(Path(run.dir).parent, start["dir"])
        self.write(state=OPEN, mode=start["mode"], folder=folder)

    def count(self, step: int) -> None:
        """Record that a row of this step was taken."""
        self._record = replace(self._record, step=step, rows=self._record.rows + 1)
        if time.monotonic() - self._written >= _RECORD_SECONDS:
            self.write()

    def close(self, rows: int) -> None:
        """Record that everything sent was taken, of `rows` rows in the run."""
        self.write(state=FINISHED, left_out=rows - self._record.rows)

    def write(self, **changes: Any) -> None:
        """Put it on disk."""
        self._record = replace(self._record, **changes)
        self._written = time.monotonic()
        write_record(self._path, self._record)


def _open(start: Mapping[str, Any], tell: Tell) -> Any:
    import wandb

    try:
        return wandb.init(
            id=start["id"],
            name=start["name"],
            mode=start["mode"],
            project=start["project"],
            entity=start["entity"],
            group=start["group"],
            job_type=start["job_type"],
            tags=start["tags"],
            dir=start["dir"],
            config=start["config"],
            resume="allow",
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=_INIT_SECONDS,
                # env.json has code and versions of the run; wandb would record this process's.
                disable_git=True,
                save_code=False,
                x_save_requirements=False,
                **({"x_disable_stats": True} if start["pid"] is None else {"x_stats_pid": start["pid"]}),
            ),
        )
    except Exception as error:
        if start["mode"] == "offline":
            raise
        # wandb's service keeps the run's id to itself until it has given up on the network, which takes minutes: a
        # run that is to be written offline under this id needs another service, and so another process.
        traceback.print_exc()
        tell("refused", _first_line(error))
        _leave(1)


def _messages() -> queue.SimpleQueue[dict[str, Any] | None]:
    """What comes down the pipe, read by a thread, so that its end is noticed while wandb hangs; None is the end."""
    arrived: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            message = json.loads(line)
            # While wandb hangs, rows are not taken; reading continues, to notice the end.
            if "log" not in message or arrived.qsize() < _ROWS:
                arrived.put(message)
        arrived.put(None)
        clock = threading.Timer(_ORPHAN_SECONDS, lambda: os.killpg(0, signal.SIGKILL))
        clock.daemon = True
        clock.start()

    threading.Thread(target=read, daemon=True).start()
    return arrived


def _leave(code: int) -> None:
    """End without wandb's own hooks at the end of the interpreter, which may wait for a network."""
    sys.stderr.flush()
    os._exit(code)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    main()
