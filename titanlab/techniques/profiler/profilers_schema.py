"""Configs of profiler=off, memory, trace and breakdown."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.techniques.profiler.contract import NoProfiler, Profiler, ProfilerConfig


@option("profiler", "off")
@dataclass(frozen=True, kw_only=True)
class NoProfiling(ProfilerConfig):
    """No profiler."""

    kind: str = "off"

    def implementation(self) -> Profiler:
        return NoProfiler()


@option("profiler", "memory")
@dataclass(frozen=True, kw_only=True)
class Memory(ProfilerConfig):
    """The peak of memory by phase of the step, as metrics; on GPUs also snapshots, at out-of-memory too.

    Attributes:
        skip: steps of an attempt before the first window.
        steps: steps of a window.
        every: steps from the begin of one window to the next; 0: only one window.
        entries: allocations and frees that a snapshot keeps, the latest ones.
    """

    kind: str = "memory"
    skip: int = 5
    steps: int = 3
    every: int = 100
    entries: int = 100_000

    def __post_init__(self) -> None:
        for name, least in {"skip": 1, "steps": 1, "entries": 1}.items():
            if getattr(self, name) < least:
                default = type(self).__dataclass_fields__[name].default
                raise ConfigError(
                    f"profiler.{name}", getattr(self, name), f"must be at least {least}", f"try {default}"
                )
        if self.every and self.every <= self.steps:
            rule = f"must be 0, or larger than the {self.steps} steps of a window"
            raise ConfigError("profiler.every", self.every, rule, f"try {100 * self.steps}")

    def implementation(self) -> Profiler:
        from titanlab.techniques.profiler.memory import MemoryProfiler

        return MemoryProfiler(self)


@dataclass(frozen=True, kw_only=True)
class RecordedWindows(ProfilerConfig):
    """The schedule of the recorded windows; each has one step of warm-up before it.

    Attributes:
        skip: steps of an attempt before the first window; the last of them warms the profiler up.
        steps: steps of a window.
        every: steps from the begin of one window to the next; 0: only one window.
    """

    skip: int = 5
    steps: int = 3
    every: int = 0

    def __post_init__(self) -> None:
        if self.skip < 2:
            raise ConfigError("profiler.skip", self.skip, "must be at least 2", "try 5")
        if self.steps < 1:
            raise ConfigError("profiler.steps", self.steps, "must be at least 1", "try 3")
        if self.every and self.every < self.steps + 2:
            rule = f"must be 0, or at least {self.steps + 2}: a window has {self.steps} steps, and one to warm up"
            raise ConfigError("profiler.every", self.every, rule, f"try {100 * self.steps}")

    def warms_up_after(self, steps: int) -> bool:
        """Whether the step of warm-up follows, when the attempt has done this many steps."""
        place = steps - self.skip
        return place == -1 or (self.every > 0 and place > -1 and (place + 1) % self.every == 0)


@option("profiler", "trace")
@dataclass(frozen=True, kw_only=True)
class Trace(RecordedWindows):
    """Traces of operations and kernels (Kineto), one file for each rank and window, for Perfetto.

    Attributes:
        shapes: record the shapes of operations' inputs.
        stacks: record Python's stacks.
    """

    kind: str = "trace"
    shapes: bool = True
    stacks: bool = False

    def implementation(self) -> Profiler:
        from titanlab.techniques.profiler.trace import TraceProfiler

        return TraceProfiler(self)


@option("profiler", "breakdown")
@dataclass(frozen=True, kw_only=True)
class Breakdown(RecordedWindows):
    """What the time of a step goes to, as metrics, from steps that torch.profiler records."""

    kind: str = "breakdown"
    # Profiled steps are slower: their share of the run's time stays small.
    every: int = 100

    def implementation(self) -> Profiler:
        from titanlab.techniques.profiler.trace import BreakdownProfiler

        return BreakdownProfiler(self)
