"""What a run writes while it trains: metrics.jsonl, status.json, the tracker's rows, the console, result.json.

Ranks that do not log have a `Recorder`, which does nothing; the rank that logs has a `LoggingRecorder`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titanlab.checkpoint import Position, StorePath, checkpoints_of, latest
from titanlab.costs import Meter, RunWork, meter, traffic_lines, traffic_metrics, training_flops_per_token
from titanlab.distributed import LOG, Mesh, World, axis_groups, traced, write_start_up
from titanlab.recipe import Recipe
from titanlab.records import EXPERTS, Outcome, OutcomeKind, RunFolder, State, Status, classify, exit_code, is_secondary
from titanlab.system import Console, Progress, counted, disk_fault, duration, grouped, short, shown_path, trimmed
from titanlab.techniques.compile.compiler import Watch
from titanlab.techniques.precision.cast import dtype_named
from titanlab.techniques.tracker.contract import open_tracker
from titanlab.train.totals import Load, Totals, memory, peak_flops, peak_memory_gib
from titanlab.train.tracking import HeldRows, tracked_run


class StepEnds:
    """Tells when each step has ended on its device.

    CUDA events time the steps of a GPU. The host's clock would be wrong: before a validation or a checkpoint the host
    reads the totals of the last two steps together, so one of them would seem to take no time.
    """

    def __init__(self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._last: torch.cuda.Event | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._last = torch.cuda.Event(enable_timing=True)
            self._last.record()
        self._at = clock()

    def after(self, event: torch.cuda.Event | None) -> float | None:
        """When the device reached the event at the end of a step; None: now, because a CPU has no events."""
        if event is None or self._last is None:
            return None
        # Add up from event to event: float32 milliseconds are exact enough for a step, but not for a day.
        self._at += self._last.elapsed_time(event) / 1e3
        self._last = event
        return self._at


class Recorder:
    """The interface for train.py. This class does nothing, so train.py needs no branch for ranks that do not log."""

    tracker_id: str | None = None
    # Waits until the checkpoint that is written in the background is complete.
    until_saved: Callable[[], None] | None = None

    def start(self) -> None:
        """Note that the first step begins."""

    def started(self, seconds: Mapping[str, float]) -> None:
        """Record how long each phase up to the end of the first step has taken."""

    def loading(self) -> AbstractContextManager[None]:
        """A context for `with`, in which the run waits for data."""
        return contextlib.nullcontext()

    def sending(self, mesh: Mesh) -> AbstractContextManager[None]:
        """A context in which a step computes and communicates; the traffic of the first step is traced."""
        return contextlib.nullcontext()

    def saving(self) -> AbstractContextManager[None]:
        """A context in which a checkpoint is written."""
        return contextlib.nullcontext()

    def warn(self, text: str) -> None:
        """Report a problem that does not end the run."""

    def go_back(self, step: int) -> None:
        """Note that the run continues from an earlier step."""

    def compared(self, metrics: Mapping[str, float], warning: str) -> None:
        """Add to the next rows the metrics that compare ranks; show the warning unless it is empty."""

    def measured(self, kind: str, step: int, metrics: Mapping[str, float], lines: Sequence[str]) -> None:
        """Record a row of metrics of this kind, and print the lines."""

    def validating(self, step: int) -> AbstractContextManager[Callable[[float], None]]:
        """A context in which held-out sequences are evaluated; yields a function to be called with their loss."""
        return contextlib.nullcontext(lambda loss: None)

    def record(
        self,
        step: int,
        totals: Totals,
        *,
        rate: float,
        tokens_seen: int,
        ended: float | None = None,
        next_runs: bool = False,
    ) -> None:
        """Record a step's totals.

        Args:
            ended: when the step has ended, by `time.perf_counter`; None: now.
            next_runs: whether the device already computes the next step.
        """

    def finish(self, outcome: Outcome) -> Outcome:
        """Record the end of the run; return the outcome with its metrics."""
        return outcome


# Largest number of rows with experts' counts in a run, besides the rows of its first and last step.
_MOST_ROWS = 20


class ExpertRows:
    """Sums experts' counts of tokens over steps. It seldom writes a row, because a row of a large model has 80 KB.

    A row has `counts`, the tokens of each block's experts over all ranks and microbatches, and `steps`, the number of
    steps in these sums. At which steps rows are written depends only on the length of the run, so that runs with
    different layouts can be compared.
    """

    def __init__(self, steps: int, write: Callable[[int, Mapping[str, Any]], None]) -> None:
        self._last, self._every = steps, -(-steps // _MOST_ROWS)
        self._write = write
        self._steps = 0
        self._counts = torch.zeros(0, 0, dtype=torch.float64)

    def after_step(self, step: int, load: Load) -> None:
        """Add the counts of a step."""
        counts = torch.tensor(load.counts, dtype=torch.float64)
        self._counts = counts if not self._steps else self._counts + counts
        self._steps += 1
        if step % self._every == 0 or step in (1, self._last):
            self.at_end(step)

    def go_back(self) -> None:
        """Forget the counts since the last row: the run goes back and repeats these steps."""
        self._steps = 0

    def at_end(self, step: int) -> None:
        """Write what was counted since the last row."""
        if self._steps:
            self._write(step, {"steps": self._steps, "counts": self._counts.round().long().tolist()})
        self._steps = 0


_STATUS_SECONDS = 1.0
# Seconds between writes of status.json after steps without a row of metrics. status.json shows what a stop would lose,
# and how far a killed run came.
_UNLOGGED_STATUS_SECONDS = 5.0


class LoggingRecorder(Recorder):
    """The recorder of the rank that logs."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, world: World, *, attempt: int, position: Position, console: Console
    ) -> None:
        self._recipe = recipe
        self._run = run
        self._world = world
        self._attempt = attempt
        self._console = console
        self._steps = recipe.training.steps
        step_work = work(recipe, world.device)
        self._meter = Meter(step_work, warmup_steps=recipe.training.unmeasured_steps, tokens_seen=position.tokens)
        self._metrics = run.open_metrics(attempt, resumed_step=position.step)
        described = tracked_run(recipe, run, attempt=attempt, resumed_step=position.step, id=position.tracker)
        tracker = open_tracker(recipe.tracker, described, warn=console.warn)
        self._held = HeldRows(tracker, run.saved_step) if recipe.training.on_nan == "rollback" else None
        self._tracker = self._held or tracker
        self.tracker_id = described.id
        self._status_at = 0.0
        self._traced = False
        self._ranks: dict[str, float] = {}
        self._step = position.step
        self._shown = Progress(step=position.step, steps=self._steps)
        self._latest: dict[str, object] = {}
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._validation_loss: float | None = None
        self._scaling: dict[str, object] = {}
        self._experts = ExpertRows(self._steps, functools.partial(self._write, EXPERTS))
        self._watch = Watch(active=recipe.compile.compiles, note=console.note, warn=console.warn)
        console.start(f"titanlab · {recipe.name}", start_rows(recipe, run, world.device, step_work, position))
        if slow := slow_precision(recipe, world.device):
            console.warn(slow)

    def start(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._world.device)
        self._write_status("running")
        compiles = ", which compiles the model" if self._recipe.compile.compiles else ""
        self._console.phase(f"step {self._step + 1}{compiles}")
        self._meter.begin()

    def started(self, seconds: Mapping[str, float]) -> None:
        # Clear the phase here. Where lines are not redrawn in place, the first step may print none that replaces it.
        self._console.phase(None)
        # Ignore a failed write: no other code needs this file.
        with self._meter.paused(), contextlib.suppress(OSError):
            write_start_up(self._run.attempt_folder(self._attempt), seconds)

    def loading(self) -> AbstractContextManager[None]:
        return self._meter.loading_data()

    @contextlib.contextmanager
    def sending(self, mesh: Mesh) -> Iterator[None]:
        if self._traced or self._world.world == 1:
            yield
            return
        self._traced = True
        with traced(axis_groups(mesh)) as traffic:
            yield
        rows = traffic.rows()
        heads = ["sent per step by rank 0  ", *[" " * 25] * len(rows)]
        texts = [head + line for head, line in zip(heads, traffic_lines(rows), strict=False)]
        self.measured("traffic", self._step + 1, traffic_metrics(rows), texts)

    def measured(self, kind: str, step: int, metrics: Mapping[str, float], lines: Sequence[str]) -> None:
        self._write(kind, step, metrics)
        self._tracker.log(step, dict(metrics))
        for line in lines:
            self._console.note(line)

    def warn(self, text: str) -> None:
        self._console.warn(text)

    def go_back(self, step: int) -> None:
        self._step = step
        self._meter.forget_batches()
        self._experts.go_back()
        if self._held is not None:
            self._held.go_back(step)

    def compared(self, metrics: Mapping[str, float], warning: str) -> None:
        self._ranks = dict(metrics)
        if warning:
            self._console.warn(warning)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        with self._meter.paused():
            self._write_status("saving")
            yield
            self._write_status("running")

    @contextlib.contextmanager
    def validating(self, step: int) -> Iterator[Callable[[float], None]]:
        def report(loss: float) -> None:
            self._validation_loss = loss
            row = {meter.VALIDATION_LOSS: loss}
            self._write("validation", step, row)
            self._tracker.log(step, row)
            self._console.validated(step, self._steps, loss)

        with self._meter.paused():
            yield report
            self._watch.after_validation(step)

    def record(
        self,
        step: int,
        totals: Totals,
        *,
        rate: float,
        tokens_seen: int,
        ended: float | None = None,
        next_runs: bool = False,
    ) -> None:
        self._meter.leave_out(self._watch.after_step(step, first=self._meter.steps == 0))
        seconds = self._meter.end_step(totals.tokens, at=ended)
        self._step = step
        if totals.load is not None:
            self._experts.after_step(step, totals.load)
        self._first_loss = totals.loss if self._first_loss is None else self._first_loss
        self._last_loss = totals.loss
        self._scaling = {}
        if totals.scaled is not None:
            scale = {} if math.isnan(totals.scaled.scale) else {meter.LOSS_SCALE: totals.scaled.scale}
            self._scaling = {**scale, meter.SKIPPED_STEPS: totals.scaled.skipped}
        if step % self._recipe.training.log_every and step not in (1, self._steps) and totals.finite:
            if self._console.is_live:
                progress = self._progress(step, totals, rate, step_seconds=seconds)
                # Figures that are measured over several steps stay visible until the next measurement.
                mfu, memory_gib = self._shown.mfu_percent, self._shown.memory_gib
                self._console.step(replace(progress, mfu_percent=mfu, memory_gib=memory_gib))
            if time.monotonic() - self._status_at >= _UNLOGGED_STATUS_SECONDS:
                with self._meter.paused():
                    self._write_status("running")
            return
        # While the device computes the next step, logging costs no time, so the meter need not pause.
        with contextlib.nullcontext() if next_runs else self._meter.paused():
            speed = self._meter.window()
            routing: dict[str, object] = {}
            if (load := totals.load) is not None:
                routing = {meter.EXPERT_LOAD: load.most, meter.DROPPED_SHARE: 0.0, meter.ROUTER_ENTROPY: load.entropy}
            self._latest = {
                meter.LOSS: totals.loss,
                meter.GRAD_NORM: totals.grad_norm,
                meter.LEARNING_RATE: rate,
                meter.TOKENS_SEEN: tokens_seen,
                **self._scaling,
                **routing,
                **speed.metrics(),
                **self._watch.metrics(),
                **memory(self._world.device),
                **self._ranks,
            }
            self._write("train", step, self._latest)
            self._tracker.log(step, self._latest)
            self._shown = replace(
                self._progress(step, totals, rate, step_seconds=speed.step_seconds),
                tokens_per_second=speed.tokens_per_second,
                mfu_percent=speed.mfu_percent,
                data_seconds=speed.data_seconds,
                memory_gib=peak_memory_gib(self._world.device),
                warming_up=speed.warming_up,
            )
            self._console.log(self._shown)
            if time.monotonic() - self._status_at >= _STATUS_SECONDS:
                self._write_status("running")

    def finish(self, outcome: Outcome) -> Outcome:
        summary = {**self._summary(), **memory(self._world.device), **self._ranks}
        outcome = replace(outcome, metrics=summary)
        self._experts.at_end(self._step)
        self._metrics.close()
        self._tracker.finish({**summary, "outcome": outcome.kind.value}, exit_code=outcome.kind.exit_code)
        self._run.write_result(outcome)
        tone = "good" if outcome.kind is OutcomeKind.DONE else "halted" if outcome.kind.may_continue else "bad"
        self._console.end(
            f"{outcome.kind.value}: {outcome.kind.meaning}",
            end_rows(outcome, self._run),
            tone=tone,  # type: ignore[arg-type]
            next_steps=next_steps(outcome, self._run),
        )
        return outcome

    def abandon(self, error: BaseException) -> None:
        """Close files and the tracker after an exception on this rank; the launcher writes the result."""
        # Give no outcome for a secondary failure: another rank knows the cause.
        kind = {} if is_secondary(error) else {"outcome": classify(error).value}
        # On a full disk closing fails too. Ignore that error: the message must name the run's own error.
        with contextlib.suppress(OSError):
            self._metrics.close()
        with contextlib.suppress(OSError):
            self._tracker.finish({**self._summary(), **kind}, exit_code=exit_code(error))

    def _summary(self) -> dict[str, object]:
        """The run's summary: medians of the steps after warm-up, totals, first and last losses."""
        return {
            **self._meter.summary(),
            "first_loss": self._first_loss,
            meter.LOSS: self._last_loss,
            meter.VALIDATION_LOSS: self._validation_loss,
            **self._scaling,
            **self._watch.metrics(),
        }

    def _progress(self, step: int, totals: Totals, rate: float, *, step_seconds: float) -> Progress:
        return Progress(
            step=step,
            steps=self._steps,
            loss=totals.loss,
            grad_norm=totals.grad_norm,
            learning_rate=rate,
            tokens_per_second=totals.tokens / self._world.world / max(step_seconds, 1e-9),
            devices=self._world.world,
            step_seconds=step_seconds,
            seconds_left=self._meter.seconds_left(self._steps - step),
        )

    def _write(self, kind: str, step: int, row: Mapping[str, object]) -> None:
        self._with_room(functools.partial(self._metrics.write, kind, step, row), self._metrics.flush)

    def _write_status(self, state: State) -> None:
        self._status_at = time.monotonic()
        status = Status(
            state=state,
            step=self._step,
            steps=self._steps,
            attempt=self._attempt,
            seconds_left=self._meter.seconds_left(self._steps - self._step),
            metrics=self._latest,
        )
        write = functools.partial(self._run.write_status, status)
        self._with_room(write, write)

    def _with_room(self, write: Callable[[], None], again: Callable[[], None]) -> None:
        """Write. If the disk is full, wait for the save in progress (its failure frees space), and write again."""
        try:
            write()
        except OSError as error:
            if disk_fault(error) is None or self.until_saved is None:
                raise
            self.until_saved()
            again()


@contextlib.contextmanager
def open_recorder(
    recipe: Recipe, run: RunFolder, world: World, *, attempt: int, position: Position
) -> Iterator[Recorder]:
    """The recorder for this rank; it does nothing unless the rank logs."""
    if not world.logs:
        yield Recorder()
        return
    with contextlib.ExitStack() as stack:
        log = run.logs / "rank-0.log"
        if LOG in os.environ:
            # All output goes to the log anyway: let the console write only there, with the time of day.
            null = stack.enter_context(Path(os.devnull).open("w"))
            console = stack.enter_context(Console(null, errors=null, log_file=log))
        else:
            console = stack.enter_context(Console(log_file=log))
        recorder = LoggingRecorder(recipe, run, world, attempt=attempt, position=position, console=console)
        try:
            yield recorder
        except BaseException as error:
            recorder.abandon(error)
            raise


CONVENTION = "6(N−N_emb)+12·L·H·Q·T"


def work(recipe: Recipe, device: torch.device) -> RunWork:
    """The constants for computing TFLOP/s and MFU from throughput."""
    note, account = recipe.precision.mfu_note, recipe.account
    peak, source = peak_flops(recipe.cluster, device, dtype_named(recipe.precision.formats().compute))
    return RunWork(
        devices=recipe.layout.world,
        flops_per_token=training_flops_per_token(account, seq_len=recipe.training.seq_len),
        convention=f"{CONVENTION}, less what is frozen" if account.frozen else CONVENTION,
        peak_flops=peak,
        peak_source=f"{source}; {note}" if note else source,
        may_exceed_peak=bool(note),
    )


def start_rows(
    recipe: Recipe, run: RunFolder, device: torch.device, constants: RunWork, position: Position
) -> list[tuple[str, object]]:
    """The rows of the table at the start."""
    account = recipe.account
    training, cluster = recipe.training, recipe.cluster
    vocabulary = grouped(account.vocab_size)
    accumulation = recipe.local_batch // recipe.microbatch
    batch = f"{counted(training.global_batch, 'sequence')} of {grouped(training.seq_len)}"
    if accumulation > 1:
        batch += f", in {accumulation} microbatches of {recipe.microbatch}"
    processes = f"{recipe.layout.world} process" + ("es" if recipe.layout.world > 1 else "")
    parameters = grouped(account.parameter_count)
    if account.experts is not None:
        parameters += f", of which {grouped(account.active_count)} compute a token"
    if account.frozen:
        frozen = sum(math.prod(account.parameters[name]) for name in account.frozen)
        parameters += f"; {grouped(frozen)} are frozen"
    techniques: list[tuple[str, object]] = []
    if checkpointing := recipe.ac.describe():
        techniques.append(("checkpointing", checkpointing))
    if compiled := " and ".join(name for name in ("blocks", "loss") if getattr(recipe.compile, name)):
        techniques.append(("compiled", f"{compiled}, by {recipe.compile.backend}"))
    peak = "unknown: no MFU"
    if constants.peak_flops is not None:
        peak = f"{trimmed(constants.peak_flops / 1e12)} TFLOP/s ({constants.peak_source})"
    rows: list[tuple[str, object]] = [
        ("model", f"{recipe.model.kind}, {account.layers} layers of {grouped(account.dim)}, vocabulary {vocabulary}"),
        ("parameters", parameters),
        ("layout", f"{recipe.layout.label}, {processes} on {device.type}"),
        ("precision", recipe.precision.describe(account, accelerator=cluster.accelerator, device=str(cluster.device))),
        *techniques,
        ("tokens per step", f"{grouped(recipe.tokens_per_step)} ({batch})"),
        ("FLOPs per token", f"{short(constants.flops_per_token)} ({constants.convention})"),
        ("peak per device", peak),
        ("data", recipe.data.kind),
        ("steps", grouped(training.steps)),
        ("folder", shown_path(run.path)),
    ]
    if position.step:
        rows.insert(0, ("resumes at step", grouped(position.step)))
    return rows


def end_rows(outcome: Outcome, run: RunFolder) -> list[tuple[str, object]]:
    """The rows of the panel at the end."""
    figures = outcome.metrics
    rows: list[tuple[str, object]] = [("steps", f"{grouped(outcome.step)} of {grouped(outcome.steps or 0)}")]
    if outcome.cause:
        rows.append(("cause", outcome.cause))
    if figures.get("first_loss") is not None and figures.get(meter.LOSS) is not None:
        rows.append(("loss", f"{figures['first_loss']:.4f} → {figures[meter.LOSS]:.4f}"))
    if figures.get(meter.VALIDATION_LOSS) is not None:
        rows.append(("validation loss", f"{figures[meter.VALIDATION_LOSS]:.4f}"))
    if figures.get(meter.SKIPPED_STEPS):
        skipped = grouped(figures[meter.SKIPPED_STEPS])
        rows.append(("skipped steps", f"{skipped}: their gradients were not finite, and they updated nothing"))
    if figures.get(meter.TOKENS_PER_SECOND):
        speed = f"{grouped(figures[meter.TOKENS_PER_SECOND])} tokens/s per device"
        if figures.get(meter.MFU) is not None:
            speed += f", MFU {figures[meter.MFU]:.1f}% ({figures['peak_source']})"
        rows.append(("median speed", speed))
    rows.append(("time in steps", duration(figures.get(meter.TRAIN_SECONDS) or 0.0)))
    rows.append(("folder", shown_path(run.path)))
    return rows


def next_steps(outcome: Outcome, run: RunFolder) -> list[str]:
    """Suggested commands after this outcome."""
    folder = shlex.quote(shown_path(run.path))
    if outcome.kind is OutcomeKind.DONE:
        # For a remote store assume a checkpoint, instead of asking the store again.
        place = checkpoints_of(run)
        can_generate = run.tokenizer.is_dir() and (isinstance(place, StorePath) or latest(place) is not None)
        sample = [f'titanlab generate {folder} --prompt "def "'] if can_generate else []
        return [*sample, f"less {folder}/metrics.jsonl"]
    if outcome.kind.may_continue:
        return [f"titanlab resume {folder}"]
    return [f"less {folder}/logs/rank-0.log"]


def slow_precision(recipe: Recipe, device: torch.device) -> str | None:
    """A warning that the CPU has no units for the dtype of matrix products; None if the CPU has such units."""
    compute = dtype_named(recipe.precision.formats().compute)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(compute)
    if device.type != "cpu" or name is None:
        return None
    # This operator tells whether oneDNN multiplies in the dtype. It is private in torch 2.11 to 2.13.
    supported = torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
    rule = f"this CPU has no units for {name}, and multiplies tens of times more slowly than in fp32"
    return None if supported else f"precision={recipe.precision.kind}: {rule}; try precision=fp32"
