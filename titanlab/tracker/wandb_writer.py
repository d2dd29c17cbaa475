"""The process that talks to wandb: messages as JSON lines on standard input, events on standard output.

Run as a file, never imported by a training process, and imports nothing of titanlab:

    {"start": {...}}  {"log": {"step": 5, "metrics": {...}}}  …  {"finish": {"summary": {...}, "exit_code": 0}}

Events: `started`, `trouble` (with a text for people), `finished`. Everything else that it or wandb prints
goes to logs/wandb.log.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any

# After the run's process has gone without a word, so much time for uploads.
_ORPHAN_SECONDS = 60.0
_INIT_SECONDS = 60.0
_ROWS = 50_000


def main() -> None:
    """Serve one run."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # What libraries print must not get among the events.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(event: str, text: str = "") -> None:
        # Where the run has gone nobody listens; the orphan's clock is running.
        with contextlib.suppress(OSError):
            events.write(json.dumps({"event": event, "text": text}) + "\n")
            events.flush()

    try:
        _serve(_messages(), tell)
    except BaseException as error:
        traceback.print_exc()
        tell("trouble", f"stopped ({_first_line(error)}); metrics.jsonl goes on")
        os._exit(1)
    tell("finished")
    # Nothing is left to do, and wandb's own hooks at the end of the interpreter may wait for a network.
    sys.stderr.flush()
    os._exit(0)


def _serve(messages: queue.SimpleQueue[dict[str, Any] | None], tell: Any) -> None:
    start = messages.get()
    if start is None:
        return
    run = _open(start["start"], tell)
    tell("started")
    step: int | None = None
    while True:
        message = messages.get()
        if message is None:
            run.finish(exit_code=1)  # The process that trained has died.
            return
        if "log" in message:
            known = {name: value for name, value in message["log"]["metrics"].items() if value is not None}
            step = message["log"]["step"]
            run.log(known, step=step)
        if "finish" in message:
            # Over the last values, which wandb takes for the summary unasked. It holds the last row back until a later
            # step comes, or the end, when the row's values would go over ours.
            if step is not None:
                run.log({}, step=step, commit=True)
            known = {name: value for name, value in message["finish"]["summary"].items() if value is not None}
            run.summary.update(known)
            run.finish(exit_code=message["finish"]["exit_code"])
            return


def _open(start: dict[str, Any], tell: Any) -> Any:
    import wandb

    def open_as(mode: str) -> Any:
        return wandb.init(
            id=start["id"],
            name=start["name"],
            mode=mode,  # type: ignore[arg-type]
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
                x_stats_pid=start["pid"],
            ),
        )

    try:
        return open_as(start["mode"])
    except Exception as error:
        if start["mode"] == "offline":
            raise
        traceback.print_exc()
        tell("trouble", f"could not go online ({_first_line(error)}), so it writes offline")
        return open_as("offline")


def _messages() -> queue.SimpleQueue[dict[str, Any] | None]:
    """What comes down the pipe, read by a thread, so that its end is noticed while wandb hangs; None is the end."""
    arrived: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            message = json.loads(line)
            # While wandb hangs nobody takes rows; reading must go on, to notice the end.
            if "log" not in message or arrived.qsize() < _ROWS:
                arrived.put(message)
        arrived.put(None)
        clock = threading.Timer(_ORPHAN_SECONDS, lambda: os.killpg(0, signal.SIGKILL))
        clock.daemon = True
        clock.start()

    threading.Thread(target=read, daemon=True).start()
    return arrived


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    main()
