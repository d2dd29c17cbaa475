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
from pathlib import Path
from typing import Any

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


class WindowsProfiler(Profiler):
    """Records windows of steps with torch.profiler, each after one step of warm-up; `taken` gets the record."""

    def __init__(self, config: Trace | Breakdown) -> None:
        self._config = config
        self._steps = 0
        self._profile: profile | None = None

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        self._name = f"{traces}/attempt-{attempt}-steps-{{}}-{{}}-rank-{rank}.json.gz"
        self._on_gpu = on_gpu

    def after_step(self, step: int) -> None:
        self._steps += 1
        if self._config.warms_up_after(self._steps):
            self._first, self._last = step + 2, step + 1 + self._config.steps
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
                schedule=schedule(wait=0, warmup=1, active=self._config.steps, repeat=1),
                on_trace_ready=self.taken,
                # Without this, torch 2.11 warns in the first cycle.
                acc_events=True,
                **self.options(),
            )
            self._profile.start()
        elif self._profile is not None:
            self._profile.step()
            if step == self._last:
                self._end()

    def options(self) -> dict[str, Any]:
        return {}

    def taken(self, running: profile) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        if self._profile is not None:
            running, self._profile = self._profile, None
            running.stop()

    def close(self) -> None:
        self._end()


class TraceProfiler(WindowsProfiler):
    """Writes `traces/attempt-A-steps-B-C-rank-R.json.gz` after each window; an incomplete one has fewer steps."""

    _config: Trace

    def options(self) -> dict[str, Any]:
        return {"record_shapes": self._config.shapes, "with_stack": self._config.stacks}

    def taken(self, running: profile) -> None:
        def write(path: Path) -> None:
            with chrome_trace(running) as trace, trace.open("rb") as source, gzip.open(path, "wb") as target:
                shutil.copyfileobj(source, target)

        write_whole(Path(self._name.format(self._first, self._last)), write, self.links.failed)


class BreakdownProfiler(WindowsProfiler):
    """Reports the mean over ranks of a step's parts after each window."""

    def __init__(self, config: Breakdown) -> None:
        super().__init__(config)
        self._marks = ExitStack()
        self._closed = False

    def phase(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._profile is None else record_function(PHASE + name)

    def after_step(self, step: int) -> None:
        was_recording = self._profile is not None
        if was_recording and self._on_gpu:
            # The kernels of a step must end inside the step.
            torch.cuda.synchronize()
        super().after_step(step)
        if was_recording and self._profile is None:
            self._report(step)
        elif self._profile is not None and not was_recording and not self._on_gpu:
            self._marks.enter_context(self.links.marks_collectives())

    def close(self) -> None:
        """End a window that is open; it is not reported, because other ranks may be at other steps."""
        self._closed = True
        super().close()

    def _end(self) -> None:
        self._marks.close()
        super()._end()

    def taken(self, running: profile) -> None:
        """Find the mean seconds of a step and of its parts, or the fault of the disk that prevents it."""
        self._parts: dict[str, float] = {}
        self._fault: Exception | None = None
        if self._closed:
            return
        try:
            with chrome_trace(running) as path:
                events = json.loads(path.read_bytes())["traceEvents"]
        except FAULTS as error:
            self._fault = error
            return
        self._parts = step_parts(events, self.links.axes)

    def _report(self, step: int) -> None:
        span = f"step {step}" if self._first == step else f"steps {self._first} to {step}"
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
