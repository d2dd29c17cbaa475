"""Points of a run's life at which a process waits until a test lets it go on: `HOLD=POINT` in its environment.

The tests' data install them, in the launcher and in each rank. A process that has come to its point
writes a file `held-PID` into the current folder, or HOLD_FOLDER, and goes on when there is a file `go`.
"""

import functools
import os
import time
from pathlib import Path

# Points of a launcher, which may have composed a recipe and prepared no data.
EARLY = ("claim", "begin")


def install(point: str) -> None:
    """Let this process wait at a point, if it comes there."""
    if point in EARLY:
        from titanlab.launch import execute

        _around(execute, "begin", before=point == "claim")
    elif point == "rendezvous":
        from titanlab.distributed import world

        _around(world, "_join", when=lambda ranks, *_: ranks.rank == 1)
    elif point == "save":
        from titanlab.records import RunFolder

        _around(RunFolder, "write_status", when=lambda run, status: status.state == "saving")
    elif point == "conclude":
        from titanlab.records import RunFolder

        _around(RunFolder, "write_result")
    elif point == "between restarts":
        from titanlab.launch.attempt import Restarts

        _around(Restarts, "after")


def wait() -> None:
    """Come to the point."""
    folder = Path(os.environ.get("HOLD_FOLDER", "."))
    (folder / f"held-{os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)


def _around(owner, name, *, before=True, when=lambda *arguments: True):
    usual = getattr(owner, name)

    @functools.wraps(usual)
    def holding(*arguments, **named):
        if before and when(*arguments):
            wait()
        value = usual(*arguments, **named)
        if not before:
            wait()
        return value

    setattr(owner, name, holding)
