"""Configs of profiler=off, memory, trace, breakdown and rates. Torch-free."""

from __future__ import annotations

import math
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
        every: steps from the begin of one window to the next; 0: only one window.
        entries: allocations and frees that a snapshot keeps, the latest ones.
    """

    kind: str = "memory"
    skip: int = 5
    steps: int = 3
    every: int = 100
    entries: int = 100_000

    def __post_init__(self) -> None:
        for name, example in (("skip", 5), ("steps", 3), ("entries", 100_000)):
            if getattr(self, name) < 1:
                raise ConfigError(f"profiler.{name}", getattr(self, name), "must be at least 1", f"try {example}")
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
    """How the time of a step divides into parts, as metrics, from steps that torch.profiler records."""

    kind: str = "breakdown"
    # Profiled steps are slower: their share of the run's time stays small.
    every: int = 100

    def implementation(self) -> Profiler:
        from titanlab.techniques.profiler.trace import BreakdownProfiler

        return BreakdownProfiler(self)


# The kind of the profiler's row in metrics.jsonl, and the names of its metrics: FLOP/s and bytes/s; seconds; bytes.
KIND = "rates"
PRODUCT, ATTENTION, COPY, POINTWISE = "rates/product", "rates/attention", "rates/copy", "rates/pointwise"
LAUNCH, PROCESS, COLLECTIVE = "rates/launch(s)", "rates/process(B)", "rates/collective"
# Groups of ranks for collectives: the ranks of a node, and all ranks.
NODE, WORLD = "node", "world"


@option("profiler", "rates")
@dataclass(frozen=True, kw_only=True)
class Rates(ProfilerConfig):
    """Rates of the machine, measured once before the first step: products, attention, memory, collectives.

    Attributes:
        largest: side of the largest product; the smallest has an eighth of it.
        megabytes: largest message of a collective, in 2²⁰ bytes.
    """

    kind: str = "rates"
    seconds: float = 0.2
    largest: int = 1024
    megabytes: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ConfigError("profiler.seconds", self.seconds, "must be a positive number of seconds", "try 0.2")
        for name, least, example in (("largest", 64, 1024), ("megabytes", 1, 16)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"profiler.{name}", value, f"must be at least {least}", f"try {example}")

    def implementation(self) -> Profiler:
        from titanlab.techniques.profiler.rates import RatesProfiler

        return RatesProfiler(self)
