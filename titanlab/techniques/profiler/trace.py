"""What torch.profiler (Kineto) records: traces as files, and the division of a profiled step's time into parts.

Every instant of a step belongs to one part, the first that fits: exposed communication of an axis, if a collective runs
and nothing computes; the phase that computes; data or the checkpoint, if the host is in this phase; `other`. So the
parts add up to the step.
"""

from __future__ import annotations

import bisect
import contextlib
import csv
import functools
import gzip
import json
import os
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from titanlab.system import refusal
from titanlab.techniques.profiler.contract import Profiler
from titanlab.techniques.profiler.held import forget_peak, fullest, held, held_line
from titanlab.techniques.profiler.profilers_schema import BY_ITEM, Breakdown, Trace

PHASE, ISSUE = "titanlab.phase:", "titanlab.issue:"
PHASES = ("data", "forward", "backward", "optimizer", "checkpoint", "other")
OTHER, EXPOSED, STEP = "other", "exposed_", "step"
Event = Mapping[str, Any]

_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# Events with these prefixes do not count as computation: they include waits; operations inside have their own events.
_NO_COMPUTE = ("c10d::", "_c10d_functional", "autograd::", "titanlab::")
# gloo runs a reduce_scatter as an all_reduce and drops the other ranks' parts, so the names of both kinds may appear.
_GLOO_KINDS = {"reduce_scatter": ("reduce_scatter", "all_reduce")}


class TimeSpan(NamedTuple):
    """An interval of time in µs; `name`: the part or phase of the step to which it belongs."""

    begin: float
    end: float
    name: str


def step_parts(events: Iterable[Event], axes: Mapping[str, str]) -> dict[str, float]:
    """Mean seconds of a step (`step`) and of each of its parts, over the steps in a trace; empty without steps.

    Args:
        events: `traceEvents` of a trace with the phases' annotations.
        axes: name of a process group → axis, for NCCL's kernels; the axis of all other groups is `other_group`.
    """
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [event for event in complete if event["name"].startswith("ProfilerStep#") and not _is_of_gpu(event)]
    if not steps:
        return {}
    main = steps[0]["tid"]
    phases = [
        _span(event, event["name"].removeprefix(PHASE))
        for event in complete
        if event["name"].startswith(PHASE) and event["tid"] == main and not _is_of_gpu(event)
    ]
    waits = [span for span in phases if span.name.startswith(EXPOSED)]
    own = sorted(span for span in phases if not span.name.startswith(EXPOSED))
    if any(event.get("cat") in _KERNELS for event in complete):
        layers = _of_gpu(complete, own, axes)
    else:
        layers = _of_cpu(complete, own, waits, main)
    parts: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for step in steps:
        for name, seconds in _swept(_span(step, OTHER), layers).items():
            parts[name] = parts.get(name, 0.0) + seconds
    whole = sum(step["dur"] for step in steps) / 1e6
    return {name: seconds / len(steps) for name, seconds in {STEP: whole, **parts}.items()}


# Three lists of spans. Computations, with the name of their phase (empty: the host's phase counts). Collectives, with
# the name of their part: `exposed_` and the axis. Phases of the host.
_Layers = tuple[Sequence[TimeSpan], Sequence[TimeSpan], Sequence[TimeSpan]]


def _of_cpu(events: Sequence[Event], own: list[TimeSpan], waits: list[TimeSpan], main: object) -> _Layers:
    issues = [
        (event["ts"], *event["name"].removeprefix(ISSUE).split(":"))
        for event in events
        if event["name"].startswith(ISSUE)
    ]
    sends, computes = list(waits), []
    for event in events:
        word = event["name"].removeprefix("gloo:")
        # A receive may be posted long before the rank waits for it; the wait has its own span.
        if word != event["name"] and word not in ("send", "recv"):
            sends.append(_span(event, EXPOSED + _issuer(event["ts"], word, issues)))
        is_operator = event.get("cat") == "cpu_op" and event["tid"] == main and "::" in event["name"]
        if is_operator and not event["name"].startswith(_NO_COMPUTE):
            computes.append(_span(event, ""))
    return computes, sends, own


def _issuer(time: float, kind: str, issues: list[tuple[Any, ...]]) -> str:
    """The axis of the latest annotation before this time that fits the collective; removes it from `issues`."""
    for index in range(len(issues) - 1, -1, -1):
        begin, axis, issued = issues[index]
        if begin <= time and kind in _GLOO_KINDS.get(issued, (issued,)):
            del issues[index]
            return str(axis)
    return "other_group"


def _of_gpu(events: Sequence[Event], own: list[TimeSpan], axes: Mapping[str, str]) -> _Layers:
    launched: dict[object, float] = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    starts = [span.begin for span in own]
    computes, sends = [], []
    for event in events:
        if event.get("cat") not in _KERNELS:
            continue
        arguments = event.get("args", {})
        if event["name"].startswith("nccl"):
            axis = axes.get(str(arguments.get("Process Group Name")), "other_group")
            sends.append(_span(event, EXPOSED + axis))
            continue
        # A GPU runs a kernel some time after the host launched it; the kernel belongs to the phase of the launch.
        at = launched.get(arguments.get("correlation"), float(event["ts"]))
        index = bisect.bisect_right(starts, at) - 1
        inside = index >= 0 and at < own[index].end
        computes.append(_span(event, own[index].name if inside else OTHER))
    host = [span for span in own if span.name in ("data", "checkpoint")]
    return computes, sends, host


def _swept(step: TimeSpan, layers: _Layers) -> dict[str, float]:
    """Seconds of each part inside a step."""
    changes: list[tuple[float, int, int, str]] = []
    for level, spans in enumerate(layers):
        for span in spans:
            begin, end = max(span.begin, step.begin), min(span.end, step.end)
            if begin < end:
                changes += [(begin, 1, level, span.name), (end, -1, level, span.name)]
    changes.append((step.end, 0, 0, ""))
    active: list[dict[str, int]] = [{}, {}, {}]
    parts: dict[str, float] = defaultdict(float)
    at = step.begin
    for time, change, level, name in sorted(changes):
        if time > at:
            parts[_part(active)] += (time - at) / 1e6
            at = time
        if change:
            count = active[level].get(name, 0) + change
            active[level][name] = count
            if not count:
                del active[level][name]
    return parts


def _part(active: Sequence[Mapping[str, int]]) -> str:
    computes, sends, host = active
    if named := [name for name in computes if name]:
        return named[0]
    if sends and not computes:
        return next(iter(sends))
    # The innermost of nested phases: a checkpoint may be written inside another phase.
    return list(host)[-1] if host else OTHER


def _span(event: Event, name: str) -> TimeSpan:
    return TimeSpan(event["ts"], event["ts"] + event["dur"], name)


def _is_of_gpu(event: Event) -> bool:
    return str(event.get("cat")).startswith("gpu")


def metrics(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts of a step as a row of metrics."""
    return {f"breakdown/{name}(s)": seconds for name, seconds in parts.items()}


def mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over ranks of each part; a rank that lacks a part spent no time in it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def line(parts: Mapping[str, float]) -> str:
    """One line for the log: the parts of a step, the largest first, without those that round to 0.0%."""
    whole = parts[STEP]
    named = {name.replace(EXPOSED, "exposed "): 100 * parts[name] / max(whole, 1e-12) for name in parts if name != STEP}
    shares = sorted(((share, name) for name, share in named.items() if share >= 0.05), reverse=True)
    return f"{1000 * whole:.4g} ms: {', '.join(f'{name} {share:.1f}%' for share, name in shares)}"


# torch raises RuntimeError for some faults of a disk; a truncated trace is not valid JSON (ValueError).
FAULTS = (OSError, RuntimeError, ValueError)


def write_whole(path: Path, write: Callable[[Path], object], failed: Callable[[str, Exception], None]) -> bool:
    """Write a file under another name, then rename it. If this fails, call `failed`, leave no file, return False."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # Do not create parents: a run's folder that was moved or removed must not come back.
        path.parent.mkdir(exist_ok=True)
        write(aside)
        aside.replace(path)
    except FAULTS as error:
        failed(str(path), error)
        return False
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def chrome_trace(running: profile) -> Iterator[Path]:
    """A temporary file with the trace of a profile, as JSON; it is deleted after the block.

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
    """Records windows of steps with torch.profiler, each after one step of warm-up, and calls `taken` with each."""

    def __init__(self, config: Trace | Breakdown) -> None:
        self._config = config
        self._steps = 0
        self._profile: profile | None = None

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        self._traces, self._attempt, self._rank, self._on_gpu = traces, attempt, rank, on_gpu

    def after_step(self, step: int) -> None:
        self._steps += 1
        if self._config.begins_after(self._steps):
            self._first, self._last = step + 2, step + 1 + self._config.steps
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
                schedule=schedule(wait=0, warmup=1, active=self._config.steps, repeat=1),
                on_trace_ready=self.taken,
                **self.options(),
            )
            with warnings.catch_warnings():
                # torch 2.11 warns that the profiler forgets the events of earlier cycles, but a window has one cycle.
                # acc_events is no way out: torch would make a Python object of each event at the end of the window.
                warnings.filterwarnings("ignore", "Warning: Profiler clears events")
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


# How many operators a row of metrics and a line of the log name at most.
_OPERATORS, _SHOWN = 10, 3


class TraceProfiler(WindowsProfiler):
    """Writes `traces/attempt-A-steps-B-C-rank-R.json.gz` after each window; a window that is cut short has fewer steps.

    `….operators.csv` beside it lists the operators, the costliest first; rank 0 reports the first of them.
    """

    _config: Trace

    def options(self) -> dict[str, Any]:
        return {"record_shapes": self._config.shapes, "with_stack": self._config.stacks}

    def taken(self, running: profile) -> None:
        def write(path: Path) -> None:
            with chrome_trace(running) as trace, trace.open("rb") as source, gzip.open(path, "wb") as target:
                shutil.copyfileobj(source, target)

        name = f"attempt-{self._attempt}-steps-{self._first}-{self._last}-rank-{self._rank}"
        if not write_whole(self._traces / f"{name}.json.gz", write, self.links.failed):
            return
        operators = costliest(running)
        table = self._traces / f"{name}.operators.csv"
        write_whole(table, functools.partial(_write_table, operators), self.links.failed)
        steps, whole = self._last - self._first + 1, sum(each[0] for each in operators)
        row = {f"operators/{each[1]}(s)": each[0] / steps for each in operators[:_OPERATORS]}
        shown = ", ".join(f"{each[1]} {100 * each[0] / whole:.1f}%" for each in operators[:_SHOWN])
        if row:
            text = f"steps {self._first} to {self._last}, costliest operators of rank 0: {shown}"
            self.links.report("operators", self._last, row, [text])


# Of an operator, without those it calls: seconds by which to sort, name, calls, seconds of the host and of the device.
_OperatorTime = tuple[float, str, int, float, float]


def costliest(running: profile) -> list[_OperatorTime]:
    """The operators of a profile, the costliest first: by device time, or by host time if no device was profiled."""
    found = [
        (event.key, event.count, event.self_cpu_time_total / 1e6, event.self_device_time_total / 1e6)
        for event in running.key_averages()
        # Events of the device itself are kernels; their time is already in the operators' device time.
        if event.device_type == DeviceType.CPU and not event.is_user_annotation
    ]
    on_device = any(device for *_, device in found)
    timed = ((device if on_device else host, name, calls, host, device) for name, calls, host, device in found)
    return sorted((each for each in timed if each[0] > 0), key=lambda each: -each[0])


def _write_table(operators: Sequence[_OperatorTime], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("operator", "calls", "host_seconds", "device_seconds"))
        writer.writerows(each[1:] for each in operators)


class BreakdownProfiler(WindowsProfiler):
    """Reports a step's parts, as means over ranks, after each window; after the first also what memory holds."""

    def __init__(self, config: Breakdown) -> None:
        super().__init__(config)
        self._marks = ExitStack()
        self._closed = False
        self._held: dict[str, float] = {}
        self._has_events = False

    def phase(self, name: str) -> AbstractContextManager[None]:
        if self._profile is None:
            if self._has_events and name == "data":
                # On a CPU the events of a window take memory that a step does not need: leave them out of the peak.
                self._has_events = False
                forget_peak()
            return contextlib.nullcontext()
        if not self._held and name == "optimizer":
            # The warm-up step is about to update the parameters: all gradients exist.
            self._held = held(on_gpu=self._on_gpu)
        return record_function(PHASE + name)

    def after_step(self, step: int) -> None:
        was_recording = self._profile is not None
        if was_recording and self._on_gpu:
            # Wait, so that the kernels of a step end inside the step.
            torch.cuda.synchronize()
        super().after_step(step)
        if was_recording and self._profile is None:
            self._has_events = not self._on_gpu
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
        """Store the mean seconds of a step and of its parts, or the error of the disk that prevents it."""
        self._parts: dict[str, float] = {}
        self._fault: Exception | None = None
        if self._closed:
            return
        try:
            with chrome_trace(running) as path:
                self._parts = step_parts(json.loads(path.read_bytes())["traceEvents"], self.links.axes)
        except FAULTS as error:
            self._fault = error

    def _report(self, step: int) -> None:
        """Report the window, and what the rank that needs most memory held before it."""
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
        of_ranks, self._held = self.links.gather(self._held), {}
        if all(of_ranks):
            row = fullest(of_ranks)
            self.links.report(BY_ITEM, step, row, [held_line(row)])
