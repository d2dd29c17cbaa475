"""The ranks of one start of a job over its attempts: rank 0 decides whether they start again, and which of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from titanlab.distributed.ranks import Ranks
from titanlab.launch import restarts
from titanlab.launch.job import rendezvous
from titanlab.launch.job.job import Job
from titanlab.launch.job.rendezvous import Rendezvous
from titanlab.launch.restarts import Restart, Restarts
from titanlab.recipe.recipe import Recipe, to_mapping
from titanlab.records.outcome import Outcome
from titanlab.records.run_folder import RunFolder

_POLL_SECONDS = 2.0
# Without a sign of rank 0 for this time, a rank that was left out ends.
_ALONE_SECONDS = 60.0


class Group:
    """The ranks of one start of a job, as rank 0 sees them.

    Args:
        job: of rank 0.
        say: called with a line for each decision.
    """

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._restarts: Restarts | None = None
        self._restart: Restart | None = None
        self._last: int | None = None
        self.round = 0
        self.members: tuple[int, ...] = ()

    def config(self) -> dict[str, Any]:
        """The recipe of the next attempt, as plain values."""
        return self._job.config() if self._restart is None else to_mapping(self._restart.recipe)

    def note(self, attempt: int) -> None:
        """Record in the folder of an attempt that has begun whether it is a restart."""
        if self._restart is not None and self._last is not None:
            restarts.note(self._job.run, attempt, self._restart, self._last)

    def goes_on_after(self, outcome: Outcome, recipe: Recipe | None) -> bool:
        """Decide whether the group starts again after an attempt, and tell the other ranks if it does not.

        Args:
            recipe: of the attempt; None: it could not begin, and no rank waits.
        """
        if recipe is None or not recipe.launch.restarts:
            return False
        if self._restarts is None:
            # The task of rank 0 writes the records, so that rank stays.
            self._restarts = Restarts(self._job.run, recipe.launch, fixed=(0,))
        restart, why_not = (None, "") if self._job.signals else self._restarts.after(outcome, recipe)
        self.round += 1
        if restart is None:
            if why_not:
                self._say(why_not)
            ended = Rendezvous(start=self._job.round(self.round), reason=why_not or "has ended")
            rendezvous.publish(self._job.run, ended)
            return False
        self._say(restart.why)
        if restart.left_out is not None:
            members = list(self.members or range(self._job.place.ranks.world))
            del members[restart.left_out]
            self.members = tuple(members[: restart.recipe.layout.world])
        self._restart, self._last = restart, outcome.attempt
        return True


def ranks_in(ranks: Ranks, meeting: Rendezvous) -> Ranks:
    """The rank of a process in an attempt; its device, which follows from its rank on its host, stays the same."""
    met = replace(ranks, address=meeting.address, port=meeting.port)
    if not meeting.members:
        return met
    return replace(met, rank=meeting.members.index(ranks.rank), world=len(meeting.members))


def await_end(run: RunFolder, attempt: int) -> Outcome | None:
    """The result of an attempt in which this process has no rank; None if rank 0 has gone without one."""
    alone_since = time.monotonic()
    while (result := run.result(attempt)) is None:
        if run.is_claimed():
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > _ALONE_SECONDS:
            return None
        time.sleep(_POLL_SECONDS)
    return result
