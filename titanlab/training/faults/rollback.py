"""Rollbacks: a run whose loss is not finite goes back to its newest checkpoint, and leaves the bad data out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from titanlab.checkpoint.folders import latest
from titanlab.checkpoint.remote.run_place import checkpoints_of
from titanlab.distributed.world import World
from titanlab.recipe.training_schema import Training
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.run_folder import RunFolder


class Rollbacks:
    """Decides whether a run goes back, and counts.

    The stream of data is not rewound: the sequences between the checkpoint and the bad step are left out, because the
    same sequences would lead to the same step.
    """

    def __init__(self, training: Training, run: RunFolder, world: World, *, warn: Callable[[str], None]) -> None:
        self._left = training.nan_limit if training.on_nan == "rollback" else 0
        self._limit = training.nan_limit
        self._run, self._world, self._warn = run, world, warn

    def may_follow(self, outcome: Outcome, *, after: Callable[[], None]) -> bool:
        """Whether the run goes back after this outcome; the same on every rank.

        Args:
            after: waits for a save under way, whose checkpoint counts.
        """
        if not self._left:
            return False
        after()
        if self._world.share(latest(checkpoints_of(self._run)) if self._world.logs else None) is None:
            self._warn(f"{outcome.cause}; there is no checkpoint to go back to")
            return False
        return True

    def note(self, outcome: Outcome, warnings: Sequence[str], *, to: int) -> Outcome:
        """Count and report a rollback to a step. Returns the outcome of a run that goes on."""
        self._left -= 1
        for warning in warnings:
            self._warn(warning)
        count = f"rollback {self._limit - self._left} of at most {self._limit}"
        between = f"step {to + 1}" if outcome.step == to + 1 else f"steps {to + 1} to {outcome.step}"
        self._warn(f"{outcome.cause}; back to the checkpoint of step {to}, without the data of {between} ({count})")
        return replace(outcome, kind=OutcomeKind.DONE, step=to, cause=None)
