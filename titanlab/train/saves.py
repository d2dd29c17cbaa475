"""When a run saves, and what becomes of a save that fails."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from msgspec import structs

from titanlab.checkpoint import OnlyModel, Position, Target
from titanlab.data import Stream, source
from titanlab.distributed import Mesh, Watchdog
from titanlab.recipe import Recipe
from titanlab.records import OutcomeKind, first_line
from titanlab.system import disk_fault
from titanlab.techniques.profiler.contract import Phase, nothing
from titanlab.train.assemble import Assembled
from titanlab.train.recording import Recorder
from titanlab.train.totals import Totals


class Saves:
    """The checkpoints of one attempt.

    A save at an interval that the disk refuses is reported, and the training goes on: the checkpoint before it stays.
    The last save raises its error, because the run could not go on from the steps since.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        *,
        stream: Stream,
        mesh: Mesh,
        assembled: Assembled,
        recorder: Recorder,
        watchdog: Watchdog,
        step: int,
        phase: Phase = nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._phase = phase
        self._config, self._steps = recipe.checkpoint, recipe.training.steps
        is_model = recipe.checkpoint.last == "model" and recipe.checkpoint.at_end
        self._only_model = OnlyModel(dtype=recipe.checkpoint.last_dtype) if is_model else None
        self._world, self._stream, self._mesh, self._assembled = target.world, stream, mesh, assembled
        self._recorder, self._watchdog, self._clock = recorder, watchdog, clock
        self._saver = self._config.implementation(target)
        self._tried_step = self._first_step = step
        self._tried_at = clock()
        self._is_asked = False

    @property
    def is_due(self) -> bool | None:
        """Whether the interval in minutes is over on this rank; None: there is no such interval."""
        minutes = self._config.minutes
        if not minutes:
            return None
        return self._world.logs and self._clock() - self._tried_at >= 60 * minutes

    def learn(self, totals: Totals) -> None:
        """Take from a step's totals whether rank 0's interval in minutes is over."""
        self._is_asked |= totals.saves

    def at(self, step: int) -> bool:
        """Whether to save after this step; it also reports a save that has failed since the last call."""
        if self._saver.is_done:
            self.wait()
        every = self._config.every
        if step == self._steps and self._only_model is not None:
            # The last save has the model only.
            return False
        return self._is_asked or (every > 0 and step % every == 0)

    def save(self, position: Position) -> None:
        """Save at an interval."""
        with self._pause(position):
            self.wait()
            self._tried_step, self._tried_at, self._is_asked = position.step, self._clock(), False
            with self._reported():
                self._saver.save(self._whole(position))

    def before_update(self) -> None:
        """Is called before the optimizer's step."""
        with self._phase("checkpoint"):
            self._saver.before_update()

    def finish(self, position: Position, kind: OutcomeKind) -> None:
        """Wait for the save under way, and save the last step unless that is done.

        Raises:
            OSError: the disk takes no more.
        """
        with self._pause(position):
            self.wait()
            # A state with NaN must not be saved.
            is_new = position.step > max(self._first_step, self._saver.saved_step)
            if self._config.at_end and is_new and kind is not OutcomeKind.NAN:
                only_model = self._only_model if position.step == self._steps else None
                self._saver.save_last(self._whole(position), only_model)

    def _whole(self, position: Position) -> Position:
        # Ranks with the same sequences have the same state of the data stream.
        states = dict(self._world.gather((self._mesh.data_rank, self._stream.state())))
        return structs.replace(
            position,
            data=source.merge_states([states[rank] for rank in sorted(states)]),
            loss_scale=self._assembled.loss_scale.state(),
            routing=self._assembled.balance.state(),
        )

    def wait(self) -> None:
        """Wait for the save under way; one that fails is reported."""
        with self._reported():
            self._saver.wait()

    def go_on_from(self, step: int) -> None:
        """Count from this step: the run has gone back to its checkpoint."""
        self._first_step = self._saver.saved_step = step

    @contextlib.contextmanager
    def _pause(self, position: Position) -> Iterator[None]:
        with (
            self._recorder.saving(),
            self._watchdog.pausing("the checkpoint", position.step),
            self._phase("checkpoint"),
        ):
            yield

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        # Collectives raise other errors: those end the run.
        except OSError as error:
            reason = disk_fault(error, ends_run=False) or first_line(error)
            self._recorder.warn(f"the checkpoint of step {self._tried_step} is not saved: {reason}; training goes on")
