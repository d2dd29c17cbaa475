"""The ranks of one start of a job over its attempts: rank 0 decides whether they start again, and which of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from titanlab.distributed.ranks import Ranks
from titanlab.errors import ConfigError
from titanlab.launch import restarts
from titanlab.launch.job import rendezvous
from titanlab.launch.job.job import Job
from titanlab.launch.job.rendezvous import Rendezvous
from titanlab.launch.job.roll_call import Loss, lost_ranks
from titanlab.launch.restarts import Restart, Restarts, change, reduced
from titanlab.recipe.composition.frozen import check_unedited
from titanlab.recipe.recipe import Recipe, from_mapping, to_mapping
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.run_folder import RunFolder

# Ends that a lost rank may have caused.
_WITH_A_LOSS = (OutcomeKind.CRASH, OutcomeKind.HANG, OutcomeKind.OOM, OutcomeKind.NODE_FAIL)
_POLL_SECONDS = 2.0
# Without a sign of rank 0 for this time, a rank that was left out ends.
_ALONE_SECONDS = 60.0


class Group:
    """The ranks of one start of a job, as rank 0 sees them.

    Args:
        job: of rank 0.
        say: called with a line for each decision.

    Attributes:
        round: number of the attempt in this start, from 0.
        members: ranks of the job that take part; empty: all of them.
    """

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._restarts: Restarts | None = None
        self._restart: Restart | None = None
        self._last: int | None = None
        self._left_out: set[int] = set()
        self._loss = Loss()
        self.round = 0
        self.members: tuple[int, ...] = ()

    @property
    def has_lost_nodes(self) -> bool:
        """Whether the last attempt has lost a node of the job."""
        return bool(self._loss.nodes)

    def config(self) -> dict[str, Any]:
        """The recipe of the next attempt as plain values, not yet fitted to a job that has become smaller."""
        return self._job.config() if self._restart is None else to_mapping(self._restart.recipe)

    def recipe(self) -> Recipe:
        """The recipe of the next attempt.

        A job that is put back into the queue after it has lost a node may start on fewer nodes: then the layout is
        smaller, by the same rule.

        Raises:
            ConfigError: the recipe is not valid, or no layout fits so few processes.
        """
        if self._restart is not None:
            return self._restart.recipe
        check_unedited(self._job.run)
        recipe: Recipe = from_mapping(self._job.config())
        world, least = self._job.place.ranks.world, recipe.launch.min_world
        if least is None or world >= recipe.layout.world:
            return recipe
        smaller = reduced(recipe, world, least)
        if smaller is None:
            rule = f"has {recipe.layout.world} processes, the job has {world}, and no layout of at least {least} fits"
            cure = f"cancel the job, and submit the run again: titanlab resume {self._job.run.path}"
            raise ConfigError("launch.min_world", least, rule, cure)
        self.members = tuple(range(smaller.layout.world)) if smaller.layout.world < world else ()
        self._say(f"the job has {world} processes: {change(recipe, smaller)}")
        return smaller

    def note(self, attempt: int) -> None:
        """Record in the folder of an attempt that has begun whether it is a restart."""
        if self._restart is not None and self._last is not None:
            restarts.note(self._job.run, attempt, self._restart, self._last)

    def called(self, outcome: Outcome, recipe: Recipe | None) -> Outcome:
        """Find out which ranks are lost after an attempt. Returns its outcome: `node_fail` if a node of it is lost.

        Only a job that may become smaller waits for the answers of its ranks: without them, others end it.
        """
        self._loss = Loss()
        if recipe is None or self._job.signals or not self._calls(recipe) or outcome.kind not in _WITH_A_LOSS:
            return outcome
        loss = self._loss = lost_ranks(self._job, outcome.attempt, known=self._left_out)
        self._left_out |= set(loss.ranks)
        members = self.members or tuple(range(self._job.place.ranks.world))
        lost = [number for number, rank in enumerate(members) if rank in loss.ranks]
        if not lost or not loss.nodes or outcome.kind is OutcomeKind.OOM:
            return outcome
        cause = f"{loss.words}; {outcome.cause}" if outcome.cause else loss.words
        outcome = replace(
            outcome, kind=OutcomeKind.NODE_FAIL, rank=lost[0], cause=cause, traceback=None, exit_code=None
        )
        self._job.run.write_result(outcome)
        return outcome

    def _calls(self, recipe: Recipe) -> bool:
        return bool(recipe.launch.restarts) and recipe.launch.min_world is not None

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
        world = self._job.place.ranks.world
        members = self.members or tuple(range(world))
        lost = self._loss.words if set(self._loss.ranks) & set(members) else ""
        restart, why_not = None, ""
        if not self._job.signals:
            usable = world - len(self._left_out) if self._calls(recipe) else None
            restart, why_not = self._restarts.after(outcome, recipe, lost=lost, usable=usable)
        self.round += 1
        if restart is None:
            if why_not:
                self._say(why_not)
            ended = Rendezvous(start=self._job.round(self.round), reason=why_not or "has ended")
            rendezvous.publish(self._job.run, ended)
            return False
        self._say(restart.why)
        if restart.left_out is not None:
            self._left_out.add(members[restart.left_out])
        if restart.left_out is not None or restart.lost:
            left = [rank for rank in range(world) if rank not in self._left_out]
            self.members = tuple(left[: restart.recipe.layout.world])
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
