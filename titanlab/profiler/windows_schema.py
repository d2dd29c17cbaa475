"""Windows of steps that torch.profiler records. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.profiler.contract import ProfilerConfig


@dataclass(kw_only=True)
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
