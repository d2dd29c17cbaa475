"""Configs of profiler=off, memory, trace, breakdown and rates. Torch-free."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from titanlab.costs import Setting
from titanlab.errors import ConfigError
from titanlab.options import combines, option
from titanlab.techniques.profiler.contract import NoProfiler, Profiler, ProfilerConfig, SeveralProfilers


@option("profiler", "off")
@dataclass(frozen=True, kw_only=True)
class NoProfiling(ProfilerConfig):
    """No profiler."""

    kind: str = "off"

    def implementation(self) -> Profiler:
        return NoProfiler()


@combines("profiler")
class Combined(ProfilerConfig):
    """Profilers that run together, `profiler=[trace,memory]`; each has a field of its option's name."""

    def parts(self) -> dict[str, ProfilerConfig]:
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "kind"}

    def check(self, setting: Setting) -> None:
        parts = self.parts()
        kinds = [config.kind for config in parts.values()]
        shown, torchs = f"[{','.join(parts)}]", [name for name, config in parts.items() if config.uses_torch_profiler]
        if repeated := [kind for kind in kinds if kinds.count(kind) > 1]:
            rule = f"has two profilers of kind {repeated[0]}"
            raise ConfigError("profiler", shown, rule, "leave one of them out")
        if len(torchs) > 1:
            rule = f"{' and '.join(torchs)} both record with torch.profiler, which runs once in a process"
            raise ConfigError("profiler", shown, rule, "leave one of them out")
        if "off" in kinds:
            raise ConfigError("profiler", shown, "off is not a profiler", "leave it out")
        for config in parts.values():
            config.check(setting)

    def implementation(self) -> Profiler:
        return SeveralProfilers([config.implementation() for config in self.parts().values()])


@dataclass(frozen=True, kw_only=True)
class Windows(ProfilerConfig):
    """The schedule of the windows of steps that are observed.

    Attributes:
        skip: steps of an attempt before the first window; a profiler that warms up uses the last of them for it.
        every: steps from the begin of one window to the next; 0: only one window.
    """

    skip: int = field(default=5, metadata={"least": 2})
    steps: int = field(default=3, metadata={"least": 1})
    every: int = 0

    # Steps of warm-up before each window.
    warm_up: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.every and self.every <= self.steps + self.warm_up:
            parts = f"a window has {self.steps} steps" + (", and one to warm up" if self.warm_up else "")
            rule = f"must be 0, or at least {self.steps + self.warm_up + 1}: {parts}"
            raise ConfigError("profiler.every", self.every, rule, f"try {100 * self.steps}")

    def begins_after(self, steps: int) -> bool:
        """Whether a window, or the warm-up before it, begins when the attempt has done this many steps."""
        place = steps - self.skip + self.warm_up
        return place == 0 or (self.every > 0 and place > 0 and place % self.every == 0)


@option("profiler", "memory")
@dataclass(frozen=True, kw_only=True)
class Memory(Windows):
    """The peak of memory by phase of the step, as metrics, and by layer; on GPUs also snapshots, at out-of-memory too.

    Attributes:
        entries: allocations and frees that a snapshot keeps, the latest ones.
    """

    kind: str = "memory"
    skip: int = field(default=5, metadata={"least": 1})
    every: int = 100
    entries: int = field(default=100_000, metadata={"least": 1})

    warm_up: ClassVar[int] = 0

    def implementation(self) -> Profiler:
        from titanlab.techniques.profiler.memory import MemoryProfiler

        return MemoryProfiler(self)


@option("profiler", "trace")
@dataclass(frozen=True, kw_only=True)
class Trace(Windows):
    """Traces of operations and kernels (Kineto), one file for each rank and window, for Perfetto.

    Attributes:
        shapes: record the shapes of operations' inputs.
        stacks: record Python's stacks.
    """

    kind: str = "trace"
    uses_torch_profiler: ClassVar[bool] = True
    shapes: bool = True
    stacks: bool = False

    def implementation(self) -> Profiler:
        from titanlab.techniques.profiler.trace import TraceProfiler

        return TraceProfiler(self)


@option("profiler", "breakdown")
@dataclass(frozen=True, kw_only=True)
class Breakdown(Windows):
    """How the time of a step divides into parts, as metrics, from steps that torch.profiler records."""

    kind: str = "breakdown"
    uses_torch_profiler: ClassVar[bool] = True
    # Profiled steps are slower, so they must be a small share of all steps.
    every: int = 100

    def implementation(self) -> Profiler:
        from titanlab.techniques.profiler.trace import BreakdownProfiler

        return BreakdownProfiler(self)


# Names in rows of metrics about what memory holds. `rest`: a rank's peak of memory minus the sum of its items.
BY_ITEM, ITEM_RANK = "memory_by_item", "memory_by_item/rank"
ITEMS, REST = ("parameters", "gradients", "optimizer state"), "rest"


def item_metric(item: str) -> str:
    """The name of an item in rows of metrics."""
    return f"{BY_ITEM}/{item.replace(' ', '_')}(GiB)"


# The kind of this profiler's row in metrics.jsonl, then names of its metrics: FLOP/s, bytes/s, seconds (s), bytes (B).
KIND = "rates"
PRODUCT, ATTENTION, COPY, POINTWISE = "rates/product", "rates/attention", "rates/copy", "rates/pointwise"
LAUNCH, PROCESS, COLLECTIVE = "rates/launch(s)", "rates/process(B)", "rates/collective"
# CAST: bytes/s that separate kernels read and write for a cast to float8. HOST: the host's seconds to start one kernel
# in eager mode. HOOK: the host's seconds for FSDP2's hooks around one collective.
CAST, HOST, HOOK = "rates/cast", "rates/host(s)", "rates/hook(s)"
# Groups of ranks for collectives: the ranks of a node, and all ranks.
NODE, WORLD = "node", "world"


@option("profiler", "rates")
@dataclass(frozen=True, kw_only=True)
class Rates(ProfilerConfig):
    """Rates of the machine, measured once before the first step: products, attention, memory, host, collectives.

    Attributes:
        seconds: time of one figure. Before, products run ten times as long, so that the clock is the sustained one.
        largest: side of the largest product; the smallest has an eighth of it. Attention has sequences of half of it.
        megabytes: largest message of a collective, in 2²⁰ bytes.
    """

    kind: str = "rates"
    seconds: float = field(default=0.2, metadata={"positive": True})
    largest: int = field(default=1024, metadata={"least": 64})
    megabytes: int = field(default=16, metadata={"least": 1})

    def implementation(self) -> Profiler:
        from titanlab.techniques.profiler.rates import RatesProfiler

        return RatesProfiler(self)
