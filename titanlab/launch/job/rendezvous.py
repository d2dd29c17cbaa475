"""How the ranks of a job find their attempt: rank 0 begins it and publishes its address; the other ranks poll for it.

It uses files, which every node sees after some delay: before this, no rank knows an address.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from titanlab.distributed.ranks import ALONE, Ranks, look_seconds
from titanlab.errors import TitanlabError
from titanlab.records.json_file import read_optional
from titanlab.records.run_folder import RunFolder
from titanlab.system.files import write_json

FILE = "rendezvous.json"
# From the first task's start to rank 0's file: the nodes of a job start together, except after a slow prologue.
WAIT_SECONDS = 600.0
_MOST_LOOK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one start of a job meet.

    Attributes:
        start: of the job, with its token; see `Place.start`.
        attempt: the number of the attempt that rank 0 has begun; 0: it has begun none, see `reason`.
        address, port: where rank 0 listens; port 0: the attempt has ended already.
        reason: why there is nothing to do.
        members: ranks of the job that take part, in the order of their ranks in the attempt; empty: all of them.
    """

    start: str
    attempt: int = 0
    address: str = ""
    port: int = 0
    reason: str = ""
    members: tuple[int, ...] = ()


def publish(run: RunFolder, meeting: Rendezvous) -> None:
    """Write the file that the other ranks poll for."""
    write_json(_file(run, meeting), {"schema": 1, **asdict(meeting)})


def find(run: RunFolder, start: str) -> Rendezvous | None:
    """The rendezvous of one start of a job; None while rank 0 has not published it."""
    attempts = run.attempts()
    paths = [run.attempt_folder(attempt) / FILE for attempt in attempts[-2:]]
    for path in (*paths, run.path / FILE):
        value = read_optional(path) or {}
        value.pop("schema", None)
        # Another process may leave a file of another version.
        with contextlib.suppress(TypeError):
            meeting = Rendezvous(**{**value, "members": tuple(value.get("members", ()))})
            if meeting.start == start:
                return meeting
    return None


def wait(run: RunFolder, start: str, *, ranks: Ranks = ALONE, seconds: float = WAIT_SECONDS) -> Rendezvous:
    """Wait for the rendezvous of one start of a job, and look ever less often, as all ranks of a large job look.

    Args:
        ranks: of this process.

    Raises:
        TitanlabError: rank 0 does not publish it in time.
    """
    begin = time.monotonic()
    least = look_seconds(ranks.world, is_first=ranks.local_rank == 0)
    while (meeting := find(run, start)) is None:
        waited = time.monotonic() - begin
        if waited > seconds:
            where = run.path / "attempts"
            raise TitanlabError(f"rank 0 of this job has begun no attempt in {where} within {seconds:g} s; see its log")
        time.sleep(max(least, min(_MOST_LOOK_SECONDS, waited / 10)))
    return meeting


def _file(run: RunFolder, meeting: Rendezvous) -> Path:
    # Without an attempt the file is in the run's folder: the next start replaces it.
    return (run.attempt_folder(meeting.attempt) if meeting.attempt else run.path) / FILE
