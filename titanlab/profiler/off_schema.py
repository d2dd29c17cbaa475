"""Config of profiler=off."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.profiler.contract import Profiler, ProfilerConfig


@option("profiler", "off")
@dataclass(kw_only=True)
class Off(ProfilerConfig):
    """No profiler."""

    kind: str = "off"

    def implementation(self) -> Profiler:
        from titanlab.profiler.off import NoProfiler

        return NoProfiler()
