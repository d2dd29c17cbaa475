"""What torch.profiler (Kineto) records: traces as files, and the parts of sampled steps as metrics."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from titanlab.system import refusal
from titanlab.techniques.profiler.contract import Profiler
from titanlab.techniques.profiler.profilers_schema import Breakdown, Trace
from titanlab.techniques.profiler.step_parts import PHASE, line, mean, metrics, step_parts

# torch raises RuntimeError for some faults of a disk; a truncated trace is not valid JSON (ValueError).
FAULTS = (OSError, RuntimeError, ValueError)


def write_whole(path: Path, write: Callable[[Path], object], failed: Callable[[str, Exception], None]) -> None:
    """Write a file under another name, and rename it; if this fails, report it and leave no file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # Do not create parents: a run's folder that was moved or removed must not come back.
        path.parent.mkdir(exist_ok=True)
        write(aside)
        aside.replace(path)
    except FAULTS as error:
        failed(str(path), error)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


@contextlib.contextmanager
def chrome_trace(running: profile) -> Iterator[Path]:
    """A temporary file with the trace of a profile, as JSON.

    Raises:
        OSError: the folder for temporary files is full.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        running.export_chrome_trace(str(path))
        # If the disk is full, torch only logs a line and leaves no file, or an empty one.
        if not path.exists() or not path.stat().st_size:
            path.touch()
            raise refusal(path.parent) or OSError(f"torch.profiler has written no trace into {path.parent}")
        yield path


class TraceProfiler(Profiler):
    """Writes `traces/attempt-A-steps-B-C-rank-R.json.gz` after each window."""

    def __init__(self, config: Trace) -> None:
        self._config = config
        self._steps = 0
        self._profile: profile | None = None

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        self._traces, self._rank, self._attempt = traces, rank, attempt
        self._activities = _activities(on_gpu=on_gpu)

    def after_step(self, step: int) -> None:
        self._steps += 1
        if self._config.warms_up_after(self._steps):
            self._begin(step + 2)
        elif self._profile is not None:
            self._profile.step()
            if step == self._last:
                self.close()

    def close(self) -> None:
        """End a window that is open; an incomplete window gives a file of the steps that were recorded."""
        if self._profile is not None:
            running, self._profile = self._profile, None
            running.stop()

    def _begin(self, first: int) -> None:
        self._last = first + self._config.steps - 1
        path = self._traces / f"attempt-{self._attempt}-steps-{first}-{self._last}-rank-{self._rank}.json.gz"
        self._profile = profile(
            activities=self._activities,
            schedule=schedule(wait=0, warmup=1, active=self._config.steps, repeat=1),
            on_trace_ready=lambda running: write_whole(path, partial(_write, running), self.links.failed),
            record_shapes=self._config.shapes,
            with_stack=self._config.stacks,
            # Without this, torch 2.11 warns in the first cycle.
            acc_events=True,
        )
        self._profile.start()


def _write(running: profile, path: Path) -> None:
    with chrome_trace(running) as trace, trace.open("rb") as source, gzip.open(path, "wb") as target:
        shutil.copyfileobj(source, target)


class BreakdownProfiler(Profiler):
    """Records windows of steps with torch.profiler, and reports the mean over ranks of a step's parts."""

    def __init__(self, config: Breakdown) -> None:
        self._config = config
        self._steps = 0
        self._profile: profile | None = None
        self._marks = ExitStack()

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def phase(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._profile is None else record_function(PHASE + name)

    def after_step(self, step: int) -> None:
        self._steps += 1
        if self._config.warms_up_after(self._steps):
            self._begin(step + 1 + self._config.steps)
        elif self._profile is not None:
            if self._on_gpu:
                # The kernels of a step must end inside the step.
                torch.cuda.synchronize()
            self._profile.step()
            if step == self._last:
                self._end()
                self._report(step)

    def close(self) -> None:
        """End a window that is open; it is not reported, because other ranks may be at other steps."""
        self._is_wanted = False
        if self._profile is not None:
            self._end()

    def _begin(self, last: int) -> None:
        self._last, self._is_wanted = last, True
        self._parts: dict[str, float] = {}
        self._fault: Exception | None = None
        self._profile = profile(
            activities=_activities(on_gpu=self._on_gpu),
            schedule=schedule(wait=0, warmup=1, active=self._config.steps, repeat=1),
            on_trace_ready=self._analyse,
            acc_events=True,
        )
        self._profile.start()
        if not self._on_gpu:
            self._marks.enter_context(self.links.marks_collectives())

    def _end(self) -> None:
        running, self._profile = self._profile, None
        self._marks.close()
        if running is not None:
            running.stop()

    def _analyse(self, running: profile) -> None:
        """Find the mean seconds of a step and of its parts, or the fault of the disk that prevents it."""
        if not self._is_wanted:
            return
        try:
            with chrome_trace(running) as path:
                events = json.loads(path.read_bytes())["traceEvents"]
        except FAULTS as error:
            self._fault = error
            return
        self._parts = step_parts(events, self.links.axes)

    def _report(self, step: int) -> None:
        steps = self._config.steps
        span = f"step {step}" if steps == 1 else f"steps {step - steps + 1} to {step}"
        if self._fault is not None:
            self.links.failed(f"the breakdown of {span}", self._fault)
        # A rank without a result takes part too, because the others wait for it.
        of_ranks = self.links.gather(self._parts)
        if all(of_ranks):
            means = mean(of_ranks)
            self.links.report("breakdown", step, metrics(means), [f"{span}, mean over ranks: {line(means)}"])
        elif self._fault is None:
            lacks = ", ".join(str(rank) for rank, found in enumerate(of_ranks) if not found)
            self.links.failed(f"the breakdown of {span}", f"its part is missing on rank {lacks}")


def _activities(*, on_gpu: bool) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
