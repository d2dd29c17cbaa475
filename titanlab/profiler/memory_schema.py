"""Config of profiler=memory."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.profiler.contract import Profiler, ProfilerConfig


@option("profiler", "memory")
@dataclass(kw_only=True)
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
        from titanlab.profiler.memory import MemoryProfiler

        return MemoryProfiler(self)
