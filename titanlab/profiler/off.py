"""No profiler."""

from __future__ import annotations

from pathlib import Path

from titanlab.profiler.contract import Profiler


class NoProfiler(Profiler):
    """Does nothing."""

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        """Start nothing."""

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Close nothing."""
