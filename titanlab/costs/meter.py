"""Measures the seconds, tokens and FLOPs of a run's steps, with a clock and without a device.

A step lasts from the end of the previous step to its own end, without the time inside `paused` (validation,
checkpoints). An accelerator still computes while the host already sends the next step: pass `end_step` the time at
which the device has ended the step.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Names of metrics in rows, results and trackers; torchtitan's name if it has the metric.
LOSS = "loss_metrics/global_avg_loss"
GRAD_NORM = "grad_norm"
LEARNING_RATE = "lr"
LOSS_SCALE = "loss_scale"
SKIPPED_STEPS = "skipped_steps"
# Only for models with experts: the largest load of an expert relative to the mean of its block, the share of tokens
# that no expert has computed, and the mean entropy of a token's probabilities in nats.
EXPERT_LOAD = "expert_load"
DROPPED_SHARE = "dropped_share"
ROUTER_ENTROPY = "router_entropy"
TOKENS_PER_SECOND = "throughput(tps)"
TFLOPS = "tflops"
MFU = "mfu(%)"
STEP_SECONDS = "time_metrics/end_to_end(s)"
STEP_SECONDS_MEDIAN = "time_metrics/end_to_end_median(s)"
# Quartiles in a summary: a quarter of the steps after warm-up took less time than the lower value, and a quarter took
# more time than the higher value.
STEP_SECONDS_LOW = "time_metrics/end_to_end_quartile_1(s)"
STEP_SECONDS_HIGH = "time_metrics/end_to_end_quartile_3(s)"
DATA_SECONDS = "time_metrics/data_loading(s)"
DATA_PERCENT = "time_metrics/data_loading(%)"
TOKENS_SEEN = "n_tokens_seen"
MEMORY_ACTIVE = "memory/max_active(GiB)"
MEMORY_RESERVED = "memory/max_reserved(GiB)"
# The largest memory of all ranks, and the rank that has it.
MEMORY_MOST, MEMORY_MOST_RANK = "memory/max_over_ranks(GiB)", "memory/max_rank"
VALIDATION_LOSS = "validation_metrics/loss"
WARMING_UP = "warming_up"
MEASURED_STEPS = "measured_steps"
TRAIN_SECONDS = "time_metrics/train(s)"
PAUSED_SECONDS = "time_metrics/paused(s)"


@dataclass(frozen=True, kw_only=True)
class RunWork:
    """The constants of a run that turn seconds into throughput, TFLOP/s and MFU.

    Attributes:
        devices: number of devices that share the tokens of a step.
        flops_per_token: FLOPs of the whole model for one token, forward and backward.
        convention: formula of the FLOPs, such as `6(N−N_emb)+12·L·H·Q·T`.
        peak_flops: peak FLOP/s of one device in the precision of the matrix products; None if unknown.
        peak_source: source of the peak (a datasheet, or a measurement at start), and notes on the meaning of the MFU.
        may_exceed_peak: whether some products have a faster format than the peak's: by convention, MFU in float8
            divides by the peak of bfloat16.
    """

    devices: int
    flops_per_token: float
    convention: str = ""
    peak_flops: float | None = None
    peak_source: str = ""
    may_exceed_peak: bool = False


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of some steps.

    Attributes:
        step_seconds, step_seconds_median: mean and median of one step.
        data_seconds: mean time per step spent waiting for data.
        tokens_per_second: tokens per second of one device.
        tflops: TFLOP/s of one device, by the convention for FLOPs per token.
        mfu_percent: share of the device's peak; None if the peak is unknown, or must be wrong (a share over 100).
    """

    steps: int
    step_seconds: float
    step_seconds_median: float
    data_seconds: float
    tokens_per_second: float
    tflops: float
    mfu_percent: float | None
    warming_up: bool

    def metrics(self) -> dict[str, Any]:
        share = 100 * self.data_seconds / self.step_seconds if self.step_seconds > 0 else 0.0
        return {
            TOKENS_PER_SECOND: self.tokens_per_second,
            TFLOPS: self.tflops,
            MFU: self.mfu_percent,
            STEP_SECONDS: self.step_seconds,
            STEP_SECONDS_MEDIAN: self.step_seconds_median,
            DATA_SECONDS: self.data_seconds,
            DATA_PERCENT: share,
            WARMING_UP: self.warming_up,
        }


class Meter:
    """Measures the steps of one attempt.

    Args:
        warmup_steps: first steps of the attempt, excluded from its summary: they compile, allocate, fill caches.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        work: RunWork,
        *,
        warmup_steps: int = 0,
        tokens_seen: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._work = work
        self._warmup_steps = warmup_steps
        self._clock = clock
        self._tokens_seen = tokens_seen
        # Arrays need eight bytes per value, which matters: they have a value for every step of the attempt.
        self._seconds = array("d")
        self._data_seconds = array("d")
        self._tokens = array("d")
        self._window_start = 0
        self._paused_total = 0.0
        # Seconds of pauses that do not recur; the estimate of the remaining time excludes them.
        self._once_total = 0.0
        self._step_paused = 0.0
        # For each step that has not ended, the seconds that it has waited for data. Two steps have not ended if the
        # host starts one before the device has ended the previous one.
        self._loaded: deque[float] = deque()
        self._depth = 0
        self._mark: float | None = None

    @property
    def steps(self) -> int:
        """Steps measured in this attempt."""
        return len(self._seconds)

    def begin(self) -> None:
        self._mark = self._clock()
        self._step_paused = 0.0
        self._loaded.clear()

    @contextlib.contextmanager
    def loading_data(self) -> Iterator[None]:
        """Count the time inside the block as waiting for data, which is a part of the step.

        Enter this once for each step if `end_step` is called with `at`.
        """
        start = self._clock()
        try:
            yield
        finally:
            # Batches for validation, inside `paused`, are not part of a step.
            if self._depth == 0:
                self._loaded.append(self._clock() - start)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside the block belongs to no step: validation, checkpoints, sampling. Blocks may be nested."""
        start = self._clock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                elapsed = self._clock() - start
                self._step_paused += elapsed
                self._paused_total += elapsed

    def leave_out(self, seconds: float) -> None:
        """Exclude time that has already passed, such as compilation, from the current step."""
        self._step_paused += seconds
        self._once_total += seconds

    def forget_batches(self) -> None:
        """Forget the batches of steps that will not end: the run goes back to an earlier step."""
        self._loaded.clear()

    def end_step(self, tokens: int, *, at: float | None = None) -> float:
        """End a step over `tokens` tokens, of all devices; return its seconds.

        Args:
            at: when the step has ended, by the meter's clock; None: now.
        """
        if self._mark is None:
            raise RuntimeError("Meter.end_step before Meter.begin")
        end = self._clock() if at is None else at
        seconds = max(0.0, end - self._mark - self._step_paused)
        self._mark = end
        self._seconds.append(seconds)
        data = 0.0
        while self._loaded:
            data += self._loaded.popleft()
            if at is not None:
                # The other values belong to later steps, which the device still computes.
                break
        self._data_seconds.append(data)
        self._tokens.append(tokens)
        self._tokens_seen += tokens
        self._step_paused = 0.0
        return seconds

    def window(self) -> Speed:
        """The speed of the steps since the last window."""
        start, self._window_start = self._window_start, self.steps
        if start == self.steps:
            raise RuntimeError("no step since the last window")
        seconds = self._seconds[start:]
        rate = sum(self._tokens[start:]) / max(sum(seconds), 1e-12)
        return self._speed(start, seconds=statistics.fmean(seconds), average=statistics.fmean, rate=rate)

    def measured(self) -> Speed | None:
        """The median speed over all steps after warm-up; None if there is no such step."""
        start = min(self._warmup_steps, self.steps)
        if start == self.steps:
            return None
        pairs = zip(self._tokens[start:], self._seconds[start:], strict=True)
        return self._speed(
            start,
            seconds=statistics.median(self._seconds[start:]),
            average=statistics.median,
            rate=statistics.median(tokens / max(span, 1e-12) for tokens, span in pairs),
        )

    def seconds_left(self, steps_left: int) -> float | None:
        """Estimate of the remaining time: from the median of recent steps after warm-up, and the pauses so far."""
        recent = self._seconds[max(min(self._warmup_steps, self.steps), self.steps - 100) :]
        if not recent:
            return None
        pauses = self._paused_total / self.steps
        return steps_left * (statistics.median(recent) + pauses)

    def summary(self) -> dict[str, Any]:
        """Medians after warm-up and totals of the attempt by metric; None for metrics without a measurement."""
        speed = self.measured()
        seconds = self._seconds[min(self._warmup_steps, self.steps) :]
        # With fewer than two steps there are no quartiles.
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [None] * 3
        names = (TOKENS_PER_SECOND, TFLOPS, MFU, STEP_SECONDS, DATA_SECONDS, DATA_PERCENT)
        figures = {} if speed is None else speed.metrics()
        return {
            **{name: figures.get(name) for name in names},
            STEP_SECONDS_LOW: low,
            STEP_SECONDS_HIGH: high,
            MEASURED_STEPS: 0 if speed is None else speed.steps,
            TOKENS_SEEN: self._tokens_seen,
            TRAIN_SECONDS: sum(self._seconds),
            PAUSED_SECONDS: self._paused_total + self._once_total,
            "flops_per_token": self._work.flops_per_token,
            "flops_convention": self._work.convention,
            "peak_tflops": None if self._work.peak_flops is None else self._work.peak_flops / 1e12,
            "peak_source": self._work.peak_source,
        }

    def _speed(self, start: int, *, seconds: float, average: Callable[[array[float]], float], rate: float) -> Speed:
        """The speed of the steps from `start` on.

        Args:
            seconds: mean or median seconds of one step.
            average: function that averages the values of several steps.
            rate: tokens per second of all devices.
        """
        per_device = rate / self._work.devices
        flops = per_device * self._work.flops_per_token
        peak = self._work.peak_flops
        share = None if peak is None else 100 * flops / peak
        return Speed(
            steps=self.steps - start,
            step_seconds=seconds,
            step_seconds_median=statistics.median(self._seconds[start:]),
            data_seconds=average(self._data_seconds[start:]),
            tokens_per_second=per_device,
            tflops=flops / 1e12,
            # Without a faster format, a share above 100 % is impossible: the peak was measured too low.
            mfu_percent=None if share is None or (share > 100 and not self._work.may_exceed_peak) else share,
            warming_up=start < self._warmup_steps,
        )
