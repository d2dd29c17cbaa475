"""Config of profiler=breakdown."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.profiler.contract import Profiler, ProfilerConfig


@option("profiler", "breakdown")
@dataclass(kw_only=True)
class Breakdown(ProfilerConfig):
    """What the time of a step goes to, as metrics, from steps that torch.profiler records.

    Attributes:
        skip: steps of an attempt before the first window; the last of them warms the profiler up.
        steps: steps of a window.
        every: steps from the begin of one window to the next; 0: only one window.
    """

    kind: str = "breakdown"
    skip: int = 5
    steps: int = 3
    every: int = 100

    def __post_init__(self) -> None:
        if self.skip < 2:
            raise ConfigError("profiler.skip", self.skip, "must be at least 2", "try 5")
        if self.steps < 1:
            raise ConfigError("profiler.steps", self.steps, "must be at least 1", "try 3")
        if self.every and self.every < self.steps + 2:
            rule = f"must be 0, or at least {self.steps + 2}: a window has {self.steps} steps, and one to warm up"
            raise ConfigError("profiler.every", self.every, rule, f"try {100 * self.steps}")

    def implementation(self) -> Profiler:
        from titanlab.profiler.breakdown import BreakdownProfiler

        return BreakdownProfiler(self)
