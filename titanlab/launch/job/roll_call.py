"""Which ranks of a job still answer after an attempt, so that the next one goes on without those on a lost node.

Every rank that waits for the next attempt leaves a file. A scheduler needs minutes to notice that a node is lost (in
Slurm SlurmdTimeout, 300 s); ranks that leave no file in a shorter time are taken for lost too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from titanlab.launch.contract import Place
from titanlab.launch.job.job import Job
from titanlab.records.run_folder import RunFolder

FOLDER = "ready"
# After the result: a rank ends its worker within 30 s, and its file may appear 10 s later on a shared file system.
ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.5
# Between two questions to the scheduler, which also serves others.
_ASK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The ranks of a job that are lost.

    Attributes:
        ranks: their numbers in the job.
        nodes: the nodes of which every rank is lost.
        words: one clause for people; empty if no rank is lost.
    """

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    words: str = ""


def answer(run: RunFolder, attempt: int, rank: int) -> None:
    """Say that a rank of the job waits for the attempt after this one; a full disk prevents it."""
    folder = run.attempt_folder(attempt) / FOLDER
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        (folder / str(rank)).touch()


def lost_ranks(job: Job, attempt: int, *, known: Collection[int] = (), seconds: float = ANSWER_SECONDS) -> Loss:
    """Wait until every rank has answered, or until it is known which ranks are lost.

    Args:
        attempt: that has ended.
        known: ranks that have been lost before; nobody waits for them.
        seconds: after this time, ranks without an answer are lost.

    Returns:
        the lost ranks, without those known before.
    """
    place, folder = job.place, job.run.attempt_folder(attempt) / FOLDER
    expected = set(range(place.ranks.world)) - {place.ranks.rank, *known}
    end, ask_at = time.monotonic() + seconds, 0.0
    gone: set[int] = set()
    while True:
        if time.monotonic() >= ask_at:
            # Also asked when all have answered: the scheduler ends the processes of a node that it has taken away.
            taken = job.launcher.lost_nodes(place)
            gone = {rank for rank in expected if node_of(place, rank) in taken}
            ask_at = time.monotonic() + _ASK_SECONDS
        absent = {rank for rank in expected if not (folder / str(rank)).exists()}
        if absent <= gone or time.monotonic() >= end:
            return _loss(place, absent | gone, gone, seconds)
        if job.signals:
            return Loss()
        time.sleep(_POLL_SECONDS)


def node_of(place: Place, rank: int) -> str:
    """The node of a rank; the ranks of a job fill its nodes in order, equally many on each."""
    return place.nodes[min(rank // ranks_per_node(place), len(place.nodes) - 1)]


def ranks_per_node(place: Place) -> int:
    """How many ranks of the job each of its nodes has."""
    return max(1, place.ranks.world // max(1, len(place.nodes)))


def _loss(place: Place, lost: Collection[int], gone: Collection[int], seconds: float) -> Loss:
    if not lost:
        return Loss()
    per_node = ranks_per_node(place)
    counts = {node: sum(node_of(place, rank) == node for rank in lost) for node in place.nodes}
    nodes = tuple(node for node, count in counts.items() if count == per_node)
    where = [node for node, count in counts.items() if count]
    reason = (
        f"do not answer within {seconds:g} s"
        if set(lost) - set(gone)
        else f"are lost: {place.launcher} has taken {_listed('node', where)} from the job"
    )
    words = f"{_listed('rank', sorted(lost))} on {', '.join(where[:8])} {reason}"
    if len(lost) == 1:
        words = words.replace(" do not answer", " does not answer").replace(" are lost", " is lost")
    return Loss(ranks=tuple(sorted(lost)), nodes=nodes, words=words)


def _listed(noun: str, what: Sequence[object]) -> str:
    shown = ", ".join(str(item) for item in what[:8])
    return f"{noun}{'s' if len(what) > 1 else ''} {shown}" + (f" and {len(what) - 8} more" if len(what) > 8 else "")
