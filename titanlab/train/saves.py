"""Protects a run's work: checkpoints, steps that are computed twice, and rollbacks from a bad step.

`RepeatedStep` runs forward and backward of a step twice, which must give the same bits. `Rollbacks` takes the run back
to its newest checkpoint, and skips the bad data.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from msgspec import structs

from titanlab.checkpoint import OnlyModel, Position, Target, checkpoints_of, generator_states, latest, set_generators
from titanlab.data import Stream, source
from titanlab.distributed import Mesh, Watchdog, World
from titanlab.dtensor import local_part
from titanlab.errors import TitanlabError
from titanlab.recipe import Recipe, Training
from titanlab.records import Outcome, OutcomeKind, RunFolder, first_line
from titanlab.system import disk_fault
from titanlab.techniques.profiler.contract import Phase, nothing
from titanlab.train.assemble import Assembled, StepBatch, Sums
from titanlab.train.recording import Recorder
from titanlab.train.totals import Totals


class Saves:
    """The checkpoints of one attempt.

    If a save at an interval fails on the disk, this is reported and training goes on: the previous checkpoint stays.
    The last save raises its error, because the steps since then would be lost.
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
        """Whether to save after this step; also reports a save that has failed since the last call."""
        if self._saver.is_done:
            self.wait()
        every = self._config.every
        if step == self._steps and self._only_model is not None:
            # The last save would have the model only.
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
        """Called before the optimizer's step."""
        with self._phase("checkpoint"):
            self._saver.before_update()

    def finish(self, position: Position, kind: OutcomeKind) -> None:
        """Wait for the save in progress, and save the last step unless it is saved.

        Raises:
            OSError: the disk is full.
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
        """Wait for the save in progress; reports its failure."""
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
        # Collectives raise other errors, which end the run.
        except OSError as error:
            reason = disk_fault(error, ends_run=False) or first_line(error)
            self._recorder.warn(f"the checkpoint of step {self._tried_step} is not saved: {reason}; training goes on")


class SilentCorruption(TitanlabError):
    """The same computation gave two results: a device or its memory is at fault, or a kernel is not deterministic."""


class _Finding(NamedTuple):
    """What differs on one rank: its own loss, and gradients (the first one's name, their number, and their bytes)."""

    loss: bool
    name: str
    parameters: int
    bytes: int


class RepeatedStep:
    """Runs some steps twice and compares.

    The first run changes nothing: gradients are dropped, buffers and random generators restored. So training goes on
    with the same bits as without the check.
    """

    def __init__(self, every: int, assembled: Assembled, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._every, self._assembled, self._optimizer, self._world = every, assembled, optimizer, world
        self._parameters = dict(assembled.model.named_parameters())
        self._first: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None
        self._calls = 0

    def before(self, step: int, batch: StepBatch) -> None:
        """Run the step for the first time, if it is checked; all ranks call it before they run the step."""
        self._calls += 1
        # The first step of an attempt compiles, and its traffic is measured.
        if not self._every or step % self._every or self._calls == 1:
            return
        generators = generator_states(self._world)
        buffers = [buffer.clone() for buffer in self._assembled.model.buffers()]
        sums = self._assembled.forward_backward(batch)
        self._first = (sums.loss_sum.clone(), {name: grad.clone() for name, grad in self._gradients()})
        self._optimizer.zero_grad()
        for buffer, kept in zip(self._assembled.model.buffers(), buffers, strict=True):
            buffer.copy_(kept)
        set_generators(generators, self._world)

    def after(self, step: int, sums: Sums) -> None:
        """Compare with the first run; all ranks call it when they have run the step.

        Raises:
            SilentCorruption: the results of a rank differ; on every rank.
        """
        if self._first is None:
            return
        (loss, gradients), self._first = self._first, None
        different = {}
        for name, gradient in self._gradients():
            count = _different(gradients[name], gradient) if name in gradients else gradient.numel()
            if count:
                different[name] = count
        is_other_loss = _different(loss, sums.loss_sum) > 0
        own = _Finding(is_other_loss, next(iter(different), ""), len(different), sum(different.values()))
        of_ranks = enumerate(self._world.gather(own))
        findings = {rank: finding for rank, finding in of_ranks if finding.loss or finding.name}
        if not findings:
            return
        # A wrong gradient spreads to other ranks when gradients are reduced; the loss is each rank's own.
        ranks = [rank for rank, finding in findings.items() if finding.loss] or list(findings)
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of ranks {', '.join(map(str, ranks))}"
        finding = findings[ranks[0]]
        wrong = ["the loss"] if finding.loss else []
        if finding.name:
            rest = f" and {finding.parameters - 1} more parameters" if finding.parameters > 1 else ""
            count_text = f"{finding.bytes} byte{'s'[: finding.bytes > 1]}"
            wrong.append(f"the gradient of {finding.name}{rest} ({count_text})")
        text = f"{named} computed {' and '.join(wrong)} twice with different results"
        raise SilentCorruption(f"silent data corruption at step {step}: {text}")

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, local_part(parameter.grad))
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        ]


def _different(first: torch.Tensor, second: torch.Tensor) -> int:
    """How many bytes differ; NaN equals NaN of the same bits."""
    views = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (first, second)]
    return int((views[0] != views[1]).sum())


class Rollbacks:
    """Decides whether a run goes back, and counts.

    The stream of data is not rewound: sequences between the checkpoint and the bad step are skipped, because the same
    sequences would lead to the same bad step.
    """

    def __init__(self, training: Training, run: RunFolder, world: World, *, warn: Callable[[str], None]) -> None:
        self._left = training.nan_limit if training.on_nan == "rollback" else 0
        self._limit = training.nan_limit
        self._run, self._world, self._warn = run, world, warn

    def may_follow(self, outcome: Outcome, *, after: Callable[[], None]) -> bool:
        """Whether the run goes back after this outcome; the same on every rank.

        Args:
            after: waits for a save in progress, whose checkpoint counts.
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
