"""Trains one run, from the start of a rank to the outcome.

World → mesh → assemble → optimizer → data → resume → steps → outcome. This module does not depend on the recipe's
techniques: `assemble` combines them into one function, `forward_backward`.

Three classes protect a run's work. `Saves` saves checkpoints. `RepeatedStep` runs forward and backward of a step twice
and compares the bits. `Rollbacks` lets a run with NaN go back to its newest checkpoint, and skip the bad data.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from msgspec import structs
from torch import nn

from titanlab.checkpoint import (
    POSITION,
    DamagedCheckpoint,
    OnlyModel,
    Place,
    Position,
    Target,
    checkpoints_of,
    chosen_by_rank_0,
    fall_back,
    find,
    generator_states,
    latest,
    load,
    on_all_ranks,
    one_line,
    set_generators,
)
from titanlab.data import Stream, source
from titanlab.distributed import (
    STOPS,
    Mesh,
    Ranks,
    StartUp,
    StopRequest,
    Watchdog,
    World,
    axis_groups,
    build_mesh,
    marked_collectives,
    open_world,
    stop_request,
    topology,
)
from titanlab.dtensor import local_part
from titanlab.errors import DamagedPosition, TitanlabError
from titanlab.parallelism import Gradients
from titanlab.recipe import Recipe, Training
from titanlab.records import Outcome, OutcomeKind, RunFolder, first_line
from titanlab.system import disk_fault
from titanlab.techniques.optimizer.contract import rate_factor
from titanlab.techniques.profiler.contract import Links, Phase, Profiler
from titanlab.techniques.profiler.memory import named_consumers
from titanlab.train.assemble import Assembled, StepBatch, Sums, assemble
from titanlab.train.recording import Recorder, StepEnds, open_recorder
from titanlab.train.starting_weights import contents_of, fill_start
from titanlab.train.totals import RankTimes, Reduction, Totals

_STOPPED = {
    signal.SIGINT: "interrupted by SIGINT (Ctrl-C); the run can be resumed",
    signal.SIGTERM: "asked to end by SIGTERM; the run can be resumed",
    signal.SIGUSR2: "warned by SIGUSR2; the run can be resumed",
    signal.SIGXCPU: "its time is used up (SIGXCPU); the run can be resumed",
}


class Observer:
    """Reads the state of a run without changing it; parity proofs subclass it."""

    def with_gradients(self, step: int, model: nn.Module) -> None:
        """Called before the optimizer's step, with the gradients that it will use."""

    def after_step(self, step: int, totals: Totals) -> None:
        """Called when a step's totals are known."""

    def at_end(self, model: nn.Module) -> None:
        """Called after the last step."""


def train(
    recipe: Recipe,
    run: RunFolder,
    ranks: Ranks,
    *,
    attempt: int | None = None,
    stop: StopRequest | None = None,
    watchdog: Watchdog | None = None,
    observer: Observer | None = None,
    start_up: StartUp | None = None,
) -> Outcome:
    """Train a resolved recipe as one of its ranks, from the latest checkpoint in the run's folder to the end.

    All ranks call it together. Rank 0 writes metrics, status and result into the folder.

    Args:
        attempt: number of the attempt if every rank has it; None: the run's latest, as rank 0 reads it.
        stop: the caller's stop request, which signals may have set before torch was imported; None: a new one.
        start_up: records how long each phase before the first step takes; None: record only the phases of this call.

    Returns:
        the outcome, the same on every rank.

    Raises:
        ConfigError: the device is missing, or a checkpoint belongs to another model.
    """
    observer, start_up = observer or Observer(), start_up or StartUp()
    watchdog = watchdog or Watchdog(step_seconds=0.0, first_seconds=None, note=lambda outcome, record: None)
    with contextlib.ExitStack() as stack:
        stop = stop or stack.enter_context(stop_request())
        rendezvous = f"rendezvous of {ranks.world} ranks" if ranks.world > 1 else "opening the device"
        start_up.begin("rendezvous", rendezvous)
        world = stack.enter_context(
            open_world(
                ranks,
                accelerator=recipe.cluster.accelerator,
                seed=recipe.seed,
                deterministic=recipe.training.deterministic,
                waits=lambda text: start_up.begin("rendezvous", text),
            )
        )
        stack.enter_context(named_consumers())
        attempt = world.share(run.newest_attempt() or 1) if attempt is None else attempt
        mesh = build_mesh(recipe.layout, world.device.type)
        watchdog.learn(topology(mesh))
        start_up.begin("model", "building the model")
        profiler = recipe.profiler.implementation()
        assembled = assemble(recipe, world, mesh, phase=profiler.phase)
        watchdog.learn(topology(mesh, assembled.messages))
        model = assembled.model
        parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        optimizer = recipe.optimizer.implementation().build(parameters)
        gradients = Gradients(parameters.values(), world.world // recipe.layout.pipeline)
        start_up.begin("state", "loading the state to start from")

        def open_stream(start: Position) -> Stream:
            assembled.restore(start)
            start_up.begin("data", "opening the data")
            return source.open_train(
                recipe.data,
                seed=recipe.seed,
                seq_len=recipe.training.seq_len,
                global_batch=recipe.training.global_batch,
                rank=mesh.data_rank,
                ranks=recipe.layout.data,
                state=start.data or None,
            )

        position, stream, warnings = load_start(recipe, run, attempt, model, optimizer, world, restore=open_stream)
        stack.callback(stream.close)
        start_up.begin("recorder")
        start_up.show_no_more()
        recorder = stack.enter_context(open_recorder(recipe, run, world, attempt=attempt, position=position))
        for warning in warnings:
            recorder.warn(warning)
        position = structs.replace(position, tracker=recorder.tracker_id, layout=recipe.layout.degrees())
        target = Target(
            folder=checkpoints_of(run),
            model=model,
            optimizer=optimizer,
            world=world,
            keep=recipe.checkpoint.keep,
            keep_every=recipe.checkpoint.keep_every,
            recipe=None if (known := run.identity()) is None else known.sha256,
            warn=recorder.warn,
            saved=lambda step: run.note_saved(attempt, step),
        )
        saves = Saves(
            recipe,
            target,
            stream=stream,
            mesh=mesh,
            assembled=assembled,
            recorder=recorder,
            watchdog=watchdog,
            phase=profiler.phase,
            step=position.step,
        )
        recorder.until_saved = saves.wait
        outcome = Outcome(kind=OutcomeKind.DONE, steps=recipe.training.steps, attempt=attempt)
        waiting: list[tuple[int, float, Reduction]] = []

        def settle(lag: int) -> None:
            nonlocal position, outcome
            while len(waiting) > lag:
                known_step, known_rate, reduction = waiting.pop(0)
                totals = reduction.read()
                position = structs.replace(position, step=known_step, tokens=position.tokens + totals.tokens)
                observer.after_step(known_step, totals)
                recorder.record(
                    known_step,
                    totals,
                    rate=known_rate,
                    tokens_seen=position.tokens,
                    ended=step_ends.after(reduction.arrived),
                    next_runs=len(waiting) > 0,
                )
                if (started := start_up.end()) is not None:
                    recorder.started(started)
                saves.learn(totals)
                outcome = _judge(outcome, known_step, totals, stop)

        def validates(step: int) -> bool:
            every = recipe.training.validate_every
            return every > 0 and (step == recipe.training.steps or step % every == 0)

        def validate_after(step: int) -> None:
            with recorder.validating(step) as report, watchdog.pausing("validation", step):
                report(validate(recipe, assembled, world, mesh))

        repeated = RepeatedStep(recipe.training.check_every, assembled, optimizer, world)
        stack.enter_context(profiled(profiler, run, world, mesh, recorder, attempt=attempt, model=model))
        rank_times = RankTimes(
            recipe.training.compare_ranks_every,
            world,
            pipeline=recipe.layout.pipeline,
            report=recorder.compared,
        )
        rollbacks = Rollbacks(recipe.training, run, world, warn=recorder.warn)
        stack.enter_context(_no_automatic_collection())
        model.train()
        step_ends = StepEnds(world.device)
        recorder.start()
        if validates(position.step) and world.share(world.logs and _is_not_validated(run, position.step)):
            validate_after(position.step)
        start_up.begin("first_step")
        step = first_step = position.step
        while step < recipe.training.steps:
            step += 1
            watchdog.step(step)
            with recorder.loading(), rank_times.loading(), profiler.phase("data"):
                batch = assembled.to_device(stream.next_batch())
            repeated.before(step, batch)
            compiles = step == first_step + 1 and recipe.compile.compiles
            with recorder.sending(mesh), stop.at_once(active=compiles), rank_times.computing():
                sums = assembled.forward_backward(batch)
                reduction = Reduction(
                    world,
                    squared_norm=gradients.squared_norm(),
                    loss_sum=sums.loss_sum,
                    tokens=sums.tokens,
                    stop=stop.signal,
                    nominal_tokens=recipe.tokens_per_step,
                    loss_scale=assembled.loss_scale,
                    saves=saves.is_due,
                    balance=assembled.balance,
                )
            repeated.after(step, sums)
            if step == first_step + 1:
                assembled.after_first_step()
            factor = reduction.gradient_factor(recipe.training.max_grad_norm)
            if factor is not None:
                gradients.scale(factor)
            observer.with_gradients(step, model)
            rate = _set_rate(optimizer, recipe, step)
            saves.before_update()
            with profiler.phase("optimizer"):
                assembled.loss_scale.step(optimizer)
                assembled.after_update()
                optimizer.zero_grad()
            if step % recipe.training.gc_every == 0:
                gc.collect(1)
            rank_times.after_step(step, last=step == recipe.training.steps)
            # Pause the watchdog: the profiler may need longer than a step to read or write what it has recorded.
            with watchdog.pausing("the profiler", step):
                profiler.after_step(step)

            # Totals are read without waiting for the device: at once on a CPU, a step later on a GPU. Before a
            # checkpoint or a validation, all totals are read.
            waiting.append((step, rate, reduction))
            last = step == recipe.training.steps
            settle(lag=0 if world.device.type == "cpu" or last or validates(step) else 1)
            if saves.at(step):
                settle(lag=0)
            if outcome.kind is OutcomeKind.NAN and rollbacks.may_follow(outcome, after=saves.wait):
                position, _, warnings = load_start(
                    recipe, run, attempt, model, optimizer, world, restore=assembled.restore
                )
                position = structs.replace(position, tracker=recorder.tracker_id, layout=recipe.layout.degrees())
                outcome = rollbacks.note(outcome, warnings, to=position.step)
                step = position.step
                recorder.go_back(step)
                saves.go_on_from(step)
                waiting.clear()
                continue
            if outcome.kind is not OutcomeKind.DONE:
                # Do not validate, because the time to save may be short; the next attempt does this validation.
                break
            if validates(step):
                validate_after(step)
            if saves.at(step):
                saves.save(position)

        # On a GPU the totals that end a run are read one step later, so another step has run: read its totals too.
        settle(lag=0)
        watchdog.ending(position.step)
        observer.at_end(model)
        saves.finish(position, outcome.kind)
        outcome = recorder.finish(replace(outcome, step=position.step, ended=time.time()))
        # Wait until the result is on disk: a launcher ends the other ranks when one rank has exited.
        world.share(None)
        return outcome


def _is_not_validated(run: RunFolder, step: int) -> bool:
    """Whether an earlier attempt of the run ended between a step and the validation after it."""
    return run.metrics("attempt")[0]["step"] < step and all(row["step"] != step for row in run.metrics("validation"))


def _set_rate(optimizer: torch.optim.Optimizer, recipe: Recipe, step: int) -> float:
    rate: float = recipe.optimizer.lr * rate_factor(recipe.optimizer.schedule, step=step, steps=recipe.training.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _judge(outcome: Outcome, step: int, totals: Totals, stop: StopRequest) -> Outcome:
    """The outcome after a step: the outcome before it, or an outcome that ends the run."""
    if outcome.kind is OutcomeKind.NAN:
        return outcome
    # Check for NaN before the stop request, because a state with NaN must not be saved.
    if totals.lost:
        return replace(
            outcome,
            kind=OutcomeKind.NAN,
            step=step,
            cause=f"step {step}: loss {totals.loss}, gradient norm {totals.grad_norm}",
        )
    # After the last step a stop request has no effect.
    if totals.stop and outcome.kind is OutcomeKind.DONE and step != outcome.steps:
        cause = stop.cause_of(totals.stop) or _STOPPED[signal.Signals(totals.stop)]
        return replace(outcome, kind=STOPS[totals.stop], step=step, cause=cause)
    return outcome


@contextlib.contextmanager
def _no_automatic_collection() -> Iterator[None]:
    """Disable automatic garbage collection, because all ranks wait for a rank that pauses."""
    # Collect only young generations: a full collection visits all objects of torch, takes 0.17 s and frees nothing.
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


T = TypeVar("T")


def load_start(
    recipe: Recipe,
    run: RunFolder,
    attempt: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    restore: Callable[[Position], T],
) -> tuple[Position, T, list[str]]:
    """Load the run's latest checkpoint, else the checkpoint or the weights that the recipe names.

    Args:
        restore: continues from a position; if it raises `DamagedPosition`, the checkpoint counts as damaged.

    Returns:
        the position, the result of `restore`, and a line for each damaged checkpoint that was passed over.
    """

    def loaded(folder: Place, key: str) -> tuple[Position, T]:
        contents = on_all_ranks(world, lambda: contents_of(folder, key))
        position = load(contents, model, optimizer, world)
        if key != "run":
            # Drop the tracker id: it belongs to the run that saved the checkpoint.
            position = structs.replace(position, tracker=None)

        def restored() -> T:
            try:
                return restore(position)
            except DamagedPosition as error:
                raise contents.unusable(f"its {POSITION} has {one_line(error.problem)}") from error

        return position, on_all_ranks(world, restored)

    warnings: list[str] = []
    # Rank 0 chooses, because hosts may see a new folder of a shared file system at different times.
    while (own := world.share(latest(checkpoints_of(run)) if world.logs else None)) is not None:
        try:
            return *loaded(own, "run"), warnings
        except DamagedCheckpoint as error:
            if world.share(run.has_chosen(attempt)):
                raise
            # Values that were read from the damaged checkpoint do no harm: the older checkpoint replaces all of them.
            damage = error
        warnings.append(on_all_ranks(world, lambda: fall_back(damage) if world.logs else ""))  # noqa: B023
    if recipe.checkpoint.load_from is not None:
        source, key = recipe.checkpoint.load_from, "checkpoint.load_from"
        return *loaded(chosen_by_rank_0(world, lambda: find(source, key)), key), warnings
    position = Position()
    if recipe.init_from is not None:
        biases = fill_start(recipe, model, world)
        position = Position(routing={name: list(block) for name, block in biases.items()})
    return position, restore(position), warnings


@contextlib.contextmanager
def profiled(
    profiler: Profiler, run: RunFolder, world: World, mesh: Mesh, recorder: Recorder, *, attempt: int, model: nn.Module
) -> Iterator[None]:
    """Start this rank's profiler, and close it at the end."""

    def failed(what: str, reason: Exception | str) -> None:
        if isinstance(reason, Exception):
            reason = disk_fault(reason, ends_run=False) or first_line(reason)
        text = f"{what} is not written: {reason}; training goes on"
        recorder.warn(text)
        if not world.logs:
            # This rank's recorder does nothing; standard error goes to the rank's log.
            sys.stderr.write(f"warning: {text}\n")

    axes = axis_groups(mesh)
    profiler.connect(
        Links(
            axes=axes,
            marks_collectives=lambda: marked_collectives(axes) if world.world > 1 else contextlib.nullcontext(),
            gather=world.gather,
            report=recorder.measured,
            failed=failed,
            model=model,
        )
    )
    profiler.start(run.traces, rank=world.rank, attempt=attempt, on_gpu=world.device.type == "cuda")
    try:
        yield
    finally:
        profiler.close()


def validate(recipe: Recipe, assembled: Assembled, world: World, mesh: Mesh) -> float:
    """Mean cross-entropy over the held-out sequences; every rank has the same number of batches."""
    assembled.model.eval()
    rows = iter(
        source.open_validation(
            recipe.data,
            seq_len=recipe.training.seq_len,
            sequences=recipe.training.validation_sequences,
            rank=mesh.data_rank,
            ranks=recipe.layout.data,
        )
    )
    sums = torch.zeros(2, dtype=torch.float64)
    while batch := list(itertools.islice(rows, assembled.evaluation_rows)):
        tokens, labels = (np.stack(column) for column in zip(*batch, strict=True))
        part = assembled.evaluate(assembled.to_device(source.Batch(tokens, labels)))
        sums += torch.tensor([float(part.loss_sum), float(part.tokens)], dtype=torch.float64)
    world.sum(sums)
    assembled.model.train()
    return float(sums[0] / sums[1])


class Saves:
    """Saves the checkpoints of one attempt.

    If the disk fails a save at an interval, the failure is reported and training goes on: the previous checkpoint
    stays. The last save raises its error, because the steps since the previous checkpoint would be lost.
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
        phase: Phase,
        step: int,
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
        """Whether this rank logs and the interval in minutes is over; None: the recipe has no interval in minutes."""
        minutes = self._config.minutes
        if not minutes:
            return None
        return self._world.logs and self._clock() - self._tried_at >= 60 * minutes

    def learn(self, totals: Totals) -> None:
        """Learn from a step's totals whether the interval in minutes is over on rank 0."""
        self._is_asked |= totals.saves

    def at(self, step: int) -> bool:
        """Whether to save after this step; also reports a save that has failed since the last call."""
        if self._saver.is_done:
            self.wait()
        every = self._config.every
        if step == self._steps and self._only_model is not None:
            # `finish` saves the last step, with the model only.
            return False
        return self._is_asked or (every > 0 and step % every == 0)

    def save(self, position: Position) -> None:
        """Save the checkpoint of an interval; a failure of the disk is only reported."""
        with self._pause(position):
            self.wait()
            self._tried_step, self._tried_at, self._is_asked = position.step, self._clock(), False
            with self._reported():
                self._saver.save(self._whole(position))

    def before_update(self) -> None:
        """Called before the optimizer's step, so that copies of the model for a save are complete first."""
        with self._phase("checkpoint"):
            self._saver.before_update()

    def finish(self, position: Position, kind: OutcomeKind) -> None:
        """Wait for the save in progress; save the last step unless it is saved already. OSError: the disk is full."""
        with self._pause(position):
            self.wait()
            # A state with NaN must not be saved.
            is_new = position.step > max(self._first_step, self._saver.saved_step)
            if self._config.at_end and is_new and kind is not OutcomeKind.NAN:
                only_model = self._only_model if position.step == self._steps else None
                self._saver.save_last(self._whole(position), only_model)

    def _whole(self, position: Position) -> Position:
        # Keep one state of the data stream for each data rank: ranks that get the same sequences have the same state.
        states = dict(self._world.gather((self._mesh.data_rank, self._stream.state())))
        return structs.replace(
            position,
            data=source.merge_states([states[rank] for rank in sorted(states)]),
            loss_scale=self._assembled.loss_scale.state(),
            routing=self._assembled.balance.state(),
        )

    def wait(self) -> None:
        """Wait for the save in progress; if it fails, report the failure."""
        with self._reported():
            self._saver.wait()

    def go_on_from(self, step: int) -> None:
        """Count the step as saved: the run has gone back to the checkpoint of this step."""
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


class RepeatedStep:
    """Runs forward and backward of some steps twice, and compares the results.

    After the first run gradients are dropped, and buffers and random generators are restored. So training has the same
    bits as without the check.
    """

    def __init__(self, every: int, assembled: Assembled, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._every, self._assembled, self._optimizer, self._world = every, assembled, optimizer, world
        self._parameters = dict(assembled.model.named_parameters())
        self._first: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None
        self._calls = 0

    def before(self, step: int, batch: StepBatch) -> None:
        """Run the step for the first time, if it is checked; all ranks call it before they run the step."""
        self._calls += 1
        # Never check the first step of an attempt: it compiles, and its traffic is measured.
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
            SilentCorruption: the two results of a rank differ; raised on every rank.
        """
        if self._first is None:
            return
        (loss, gradients), self._first = self._first, None
        counts = {name: _different(gradients.get(name), gradient) for name, gradient in self._gradients()}
        names = [name for name, count in counts.items() if count]
        everyone = self._world.gather((_different(loss, sums.loss_sum) > 0, names, sum(counts.values())))
        found = {rank: each for rank, each in enumerate(everyone) if each[0] or each[1]}
        if not found:
            return
        # Prefer ranks whose two losses differ: a reduction spreads a wrong gradient to other ranks, but no wrong loss.
        ranks = [rank for rank, (is_other_loss, *_) in found.items() if is_other_loss] or list(found)
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of ranks {', '.join(map(str, ranks))}"
        is_other_loss, names, count = found[ranks[0]]
        wrong = ["the loss"] if is_other_loss else []
        if names:
            rest = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
            wrong.append(f"the gradient of {names[0]}{rest} ({count} byte{'s'[: count > 1]})")
        text = f"{named} computed {' and '.join(wrong)} twice with different results"
        raise SilentCorruption(f"silent data corruption at step {step}: {text}")

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, local_part(parameter.grad))
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        ]


def _different(first: torch.Tensor | None, second: torch.Tensor) -> int:
    """The number of bytes that differ; a NaN equals a NaN with the same bits."""
    if first is None:
        return second.nbytes
    views = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (first, second)]
    return int((views[0] != views[1]).sum())


class Rollbacks:
    """Decides whether a run goes back to its newest checkpoint, and counts these rollbacks.

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
            after: waits for a save in progress, because its checkpoint may become the newest.
        """
        if not self._left:
            return False
        after()
        if self._world.share(latest(checkpoints_of(self._run)) if self._world.logs else None) is None:
            self._warn(f"{outcome.cause}; there is no checkpoint to go back to")
            return False
        return True

    def note(self, outcome: Outcome, warnings: Sequence[str], *, to: int) -> Outcome:
        """Count and report a rollback to step `to`. Returns the outcome of a run that continues."""
        self._left -= 1
        for warning in warnings:
            self._warn(warning)
        count = f"rollback {self._limit - self._left} of at most {self._limit}"
        between = f"step {to + 1}" if outcome.step == to + 1 else f"steps {to + 1} to {outcome.step}"
        self._warn(f"{outcome.cause}; back to the checkpoint of step {to}, without the data of {between} ({count})")
        return replace(outcome, kind=OutcomeKind.DONE, step=to, cause=None)
