"""How the ranks of a job find their attempt: rank 0 begins it and says where it listens, the others look for that.

All goes through files, which every node sees sooner or later: nobody has an address before.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from titanlab.errors import TitanlabError
from titanlab.records.run_folder import RunFolder
from titanlab.system.atomic_file import write_json

FILE = "rendezvous.json"
# From the first task's start to rank 0's word: nodes of one job start together, give or take a slow prologue.
WAIT_SECONDS = 600.0
POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one start of a job meet.

    Attributes:
        start: of the job, see `Place.start`; with its token.
        attempt: that rank 0 has begun; 0 where it has not, for a reason.
        address, port: where rank 0 listens; no port where the attempt has ended already.
        reason: why there is nothing to do.
    """

    start: str
    attempt: int = 0
    address: str = ""
    port: int = 0
    reason: str = ""


def publish(run: RunFolder, word: Rendezvous) -> None:
    """Tell the other ranks."""
    write_json(_file(run, word), {"schema": 1, **asdict(word)})


def find(run: RunFolder, start: str) -> Rendezvous | None:
    """Rank 0's word for one start of a job; None while there is none."""
    attempts = run.attempts()
    paths = [run.attempt_folder(attempt) / FILE for attempt in attempts[-2:]]
    for path in (*paths, run.path / FILE):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        value.pop("schema", None)
        found = Rendezvous(**value)
        if found.start == start:
            return found
    return None


def wait(run: RunFolder, start: str, *, seconds: float = WAIT_SECONDS) -> Rendezvous:
    """Rank 0's word, when it is there.

    Raises:
        TitanlabError: it does not come.
    """
    end = time.monotonic() + seconds
    while (found := find(run, start)) is None:
        if time.monotonic() > end:
            where = run.path / "attempts"
            raise TitanlabError(f"rank 0 of this job has begun no attempt in {where} within {seconds:g} s; see its log")
        time.sleep(POLL_SECONDS)
    return found


def _file(run: RunFolder, word: Rendezvous) -> Path:
    # Without an attempt it lies beside them: the next start replaces it.
    return (run.attempt_folder(word.attempt) if word.attempt else run.path) / FILE
