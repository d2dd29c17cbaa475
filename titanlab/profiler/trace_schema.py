"""Config of profiler=trace."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.profiler.contract import Profiler, ProfilerConfig


@option("profiler", "trace")
@dataclass(kw_only=True)
class Trace(ProfilerConfig):
    """Traces of operations and kernels (Kineto), one file for each rank and window, for Perfetto.

    Attributes:
        skip: steps of an attempt before the first window; the last of them warms the profiler up.
        steps: steps of a window.
        every: steps from the begin of one window to the next; 0: only one window.
        shapes: record the shapes of operations' inputs.
        stacks: record Python's stacks.
    """

    kind: str = "trace"
    skip: int = 5
    steps: int = 3
    every: int = 0
    shapes: bool = True
    stacks: bool = False

    def __post_init__(self) -> None:
        if self.skip < 2:
            raise ConfigError("profiler.skip", self.skip, "must be at least 2", "try 5")
        if self.steps < 1:
            raise ConfigError("profiler.steps", self.steps, "must be at least 1", "try 3")
        if self.every and self.every < self.steps + 2:
            rule = f"must be 0, or at least {self.steps + 2}: a window has {self.steps} steps, and one to warm up"
            raise ConfigError("profiler.every", self.every, rule, f"try {100 * self.steps}")

    def implementation(self) -> Profiler:
        from titanlab.profiler.trace import TraceProfiler

        return TraceProfiler(self)
