"""Config of profiler=trace."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option
from titanlab.profiler.contract import Profiler
from titanlab.profiler.windows_schema import RecordedWindows


@option("profiler", "trace")
@dataclass(kw_only=True)
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
        from titanlab.profiler.trace import TraceProfiler

        return TraceProfiler(self)
