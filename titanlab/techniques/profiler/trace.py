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

from titanlab.system.files import refusal
from titanlab.techniques.profiler.contract import Links, Profiler
from titanlab.techniques.profiler.profilers_schema import Breakdown, Trace
from titanlab.techniques.profiler.step_parts import PHASE, line, mean, metrics, step_parts

# torch raises RuntimeError for some faults of a disk, and a trace that is cut off is no JSON.
FAULTS = (OSError, RuntimeError, ValueError)


def write_whole(path: Path, write: Callable[[Path], object], failed: Callable[[str, Exception], None]) -> None:
    """Write a file under another name, and rename it; if this fails, report it and leave no file.

    Args:
        write: writes the path that it is given.
        failed: takes the path, and the error.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # Without the folder of the run: if that was moved or removed, it must not come back.
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
        OSError: the folder for temporary files takes no more.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        running.export_chrome_trace(str(path))
        _check_written(path)
        yield path


def _check_written(path: Path) -> None:
    """Raise an error if torch has not written the file: at a full disk it only logs a line, and leaves none."""
    if path.exists() and path.stat().st_size:
        return
    path.touch()
    raise refusal(path.parent) or OSError(f"torch.profiler has written no trace into {path.parent}")


class TraceProfiler(Profiler):
    """Writes `traces/attempt-A-steps-B-C-rank-R.json.gz` after each window."""

    def __init__(self, config: Trace) -> None:
        self._config = config
        self._steps = 0
        self._profile: profile | None = None

    def connect(self, links: Links) -> None:
        self._links = links

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        self._traces, self._rank, self._attempt = traces, rank, attempt
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    def after_step(self, step: int) -> None:
        """Start a window, or end it, if it is time to."""
        self._steps += 1
        if self._config.warms_up_after(self._steps):
            self._begin(step + 2)
        elif self._profile is not None:
            self._profile.step()
            if step == self._last:
                self.close()

    def close(self) -> None:
        """End a window that is open; one that is not complete leaves a file of the steps that it has."""
        if self._profile is not None:
            running, self._profile = self._profile, None
            running.stop()

    def _begin(self, first: int) -> None:
        self._last = first + self._config.steps - 1
        path = self._traces / f"attempt-{self._attempt}-steps-{first}-{self._last}-rank-{self._rank}.json.gz"
        self._profile = profile(
            activities=self._activities,
            schedule=schedule(wait=0, warmup=1, active=self._config.steps, repeat=1),
            on_trace_ready=lambda running: write_whole(path, partial(_write, running), self._links.failed),
            record_shapes=self._config.shapes,
            with_stack=self._config.stacks,
            # torch 2.11 warns of the first cycle without it.
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
        self._window: _Window | None = None

    def connect(self, links: Links) -> None:
        self._links = links

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        """Remember the device; there are no files."""
        self._on_gpu = on_gpu

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Annotate a phase, in the steps that are recorded."""
        if self._window is None:
            return contextlib.nullcontext()
        return record_function(PHASE + name)

    def after_step(self, step: int) -> None:
        """Start a window, or end it, if it is time to."""
        config = self._config
        self._steps += 1
        if config.warms_up_after(self._steps):
            self._window = _Window(self._links, last=step + 1 + config.steps, steps=config.steps, on_gpu=self._on_gpu)
        elif self._window is not None:
            self._window.after_step()
            if step == self._window.last:
                window, self._window = self._window, None
                self._report(step, window)

    def close(self) -> None:
        """End a window that is open; it is not reported, because other ranks may be at other steps."""
        if self._window is not None:
            window, self._window = self._window, None
            window.discard()

    def _report(self, step: int, window: _Window) -> None:
        steps = self._config.steps
        span = f"step {step}" if steps == 1 else f"steps {step - steps + 1} to {step}"
        parts, fault = window.close()
        if fault is not None:
            self._links.failed(f"the breakdown of {span}", fault)
        # A rank that has none takes part all the same, because the others wait for it.
        of_ranks = self._links.gather(parts)
        if all(of_ranks):
            means = mean(of_ranks)
            self._links.report("breakdown", step, metrics(means), [f"{span}, mean over ranks: {line(means)}"])
        elif fault is None:
            lacks = ", ".join(str(rank) for rank, found in enumerate(of_ranks) if not found)
            self._links.failed(f"the breakdown of {span}", f"its part is missing on rank {lacks}")


class _Window:
    """Some steps under torch.profiler.

    Args:
        last: the number of the last step.
    """

    def __init__(self, links: Links, *, last: int, steps: int, on_gpu: bool) -> None:
        self.last = last
        self._links, self._on_gpu = links, on_gpu
        self._parts: dict[str, float] = {}
        self._fault: Exception | None = None
        self._is_discarded = False
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._analyse,
            acc_events=True,
        )
        self._stack = ExitStack()
        self._profile.start()
        if not on_gpu:
            self._stack.enter_context(links.marks_collectives())

    def after_step(self) -> None:
        """Begin the next step."""
        if self._on_gpu:
            # So that the kernels of a step lie inside of it.
            torch.cuda.synchronize()
        self._profile.step()

    def close(self) -> tuple[dict[str, float], Exception | None]:
        """The mean seconds of a step and of its parts; empty with the fault of the disk that prevents it."""
        self._stack.close()
        self._profile.stop()
        return self._parts, self._fault

    def discard(self) -> None:
        """End the recording without its parts."""
        self._is_discarded = True
        self.close()

    def _analyse(self, running: profile) -> None:
        if self._is_discarded:
            return
        try:
            with chrome_trace(running) as path:
                events = json.loads(path.read_bytes())["traceEvents"]
        except FAULTS as error:
            self._fault = error
            return
        self._parts = step_parts(events, self._links.axes)
