"""What the time of profiled steps went to, from a trace of torch.profiler; it needs neither torch nor a GPU.

Every instant of a step belongs to one part, the first that fits: exposed communication of an axis, if a collective runs
and nothing computes; the phase that computes; data or the checkpoint, if the host is in them; `other`. So the parts add
up to the step.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

PHASE, ISSUE = "titanlab.phase:", "titanlab.issue:"
DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, OTHER = PHASES = (
    *("data", "forward", "backward"),
    *("optimizer", "checkpoint", "other"),
)
EXPOSED, STEP = "exposed_", "step"
Event = Mapping[str, Any]

_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# Events around Python code that may wait for collectives; operations inside them have their own events.
_NO_COMPUTE = ("c10d::", "_c10d_functional", "autograd::", "titanlab::")
# gloo runs a reduce_scatter as an all_reduce and drops the parts of other ranks.
_GLOO_KINDS = {"reduce_scatter": ("reduce_scatter", "all_reduce")}


class TimeSpan(NamedTuple):
    """An interval of time in µs, and what it belongs to."""

    begin: float
    end: float
    name: str


def step_parts(events: Iterable[Event], axes: Mapping[str, str]) -> dict[str, float]:
    """The mean over the steps in a trace: seconds of a step as `step`, and of each part; empty without steps.

    Args:
        events: `traceEvents` of a trace with the phases' annotations.
        axes: name of a process group → axis, for the kernels of NCCL; other groups are `other_group`.
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
    if any(event.get("cat") in _KERNELS for event in complete):
        layers = _of_gpu(complete, phases, axes)
    else:
        layers = _of_cpu(complete, phases, main)
    parts: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for step in steps:
        for name, seconds in _swept(_span(step, OTHER), layers).items():
            parts[name] = parts.get(name, 0.0) + seconds
    whole = sum(step["dur"] for step in steps) / 1e6
    return {name: seconds / len(steps) for name, seconds in {STEP: whole, **parts}.items()}


# Three kinds of spans: something computes, with the name of its phase (empty: the host's phase); collectives, with
# their axis; phases of the host.
_Layers = tuple[Sequence[TimeSpan], Sequence[TimeSpan], Sequence[TimeSpan]]


def _of_cpu(events: Sequence[Event], phases: Sequence[TimeSpan], main: object) -> _Layers:
    issues = [
        (event["ts"], *event["name"].removeprefix(ISSUE).split(":"))
        for event in events
        if event["name"].startswith(ISSUE)
    ]
    sends = []
    for event in events:
        word = event["name"].removeprefix("gloo:")
        # A receive may be posted long before the rank waits for it; the wait has its own span.
        if word != event["name"] and word not in ("send", "recv"):
            sends.append(_span(event, _issuer(event["ts"], word, issues)))
    sends += [span for span in phases if span.name.startswith(EXPOSED)]
    sends = [span._replace(name=EXPOSED + span.name.removeprefix(EXPOSED)) for span in sends]
    computes = [
        _span(event, "")
        for event in events
        if event.get("cat") == "cpu_op"
        and event["tid"] == main
        and "::" in event["name"]
        and not event["name"].startswith(_NO_COMPUTE)
    ]
    own = [span for span in phases if not span.name.startswith(EXPOSED)]
    return computes, sends, own


def _issuer(time: float, kind: str, issues: list[tuple[Any, ...]]) -> str:
    """The axis of the latest operation before this time that can have begun the collective."""
    for index in range(len(issues) - 1, -1, -1):
        begin, axis, issued = issues[index]
        if begin <= time and kind in _GLOO_KINDS.get(issued, (issued,)):
            del issues[index]
            return str(axis)
    return "other_group"


def _of_gpu(events: Sequence[Event], phases: Sequence[TimeSpan], axes: Mapping[str, str]) -> _Layers:
    launched: dict[object, float] = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    own = sorted(span for span in phases if not span.name.startswith(EXPOSED))
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
        # A GPU runs a kernel after its launch: the phase is the one in which the host launched it.
        at = launched.get(arguments.get("correlation"), float(event["ts"]))
        index = bisect.bisect_right(starts, at) - 1
        inside = index >= 0 and at < own[index].end
        computes.append(_span(event, own[index].name if inside else OTHER))
    host = [span for span in own if span.name in (DATA, CHECKPOINT)]
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
    # The latest of nested phases: a checkpoint may be written inside of another.
    return list(host)[-1] if host else OTHER


def _span(event: Event, name: str) -> TimeSpan:
    return TimeSpan(event["ts"], event["ts"] + event["dur"], name)


def _is_of_gpu(event: Event) -> bool:
    return str(event.get("cat")).startswith("gpu")


def metrics(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts by their names in rows of metrics."""
    return {f"breakdown/{name}(s)": seconds for name, seconds in parts.items()}


def mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of the ranks' parts; a part that a rank lacks took it no time."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def line(parts: Mapping[str, float]) -> str:
    """The parts in one line, the largest first, without those that round to 0.0%."""
    whole = parts[STEP]
    shares = sorted(
        ((seconds, name) for name, seconds in parts.items() if name != STEP and seconds >= whole / 2000), reverse=True
    )
    texts = [
        f"{name.replace(EXPOSED, 'exposed ')} {100 * seconds / max(whole, 1e-12):.1f}%" for seconds, name in shares
    ]
    return f"{1000 * whole:.4g} ms: {', '.join(texts)}"
