"""Config of profiler=breakdown."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.profiler.contract import Profiler
from titanlab.profiler.windows_schema import RecordedWindows


@option("profiler", "breakdown")
@dataclass(kw_only=True)
class Breakdown(RecordedWindows):
    """What the time of a step goes to, as metrics, from steps that torch.profiler records."""

    kind: str = "breakdown"
    # Profiled steps are slower: their share of the run's time stays small.
    every: int = 100

    def implementation(self) -> Profiler:
        from titanlab.profiler.breakdown import BreakdownProfiler

        return BreakdownProfiler(self)
