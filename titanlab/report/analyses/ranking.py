"""The recipes of a sweep in order, and whether the difference of the first two is more than noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlab.report.figures.records import records_of
from titanlab.sweep.ranking import rank, ranking_lines

if TYPE_CHECKING:
    from pandas import DataFrame


def ranking_text(runs: DataFrame, by: str = "tps", *, max_memory_gib: float | None = None) -> str:
    """What `titanlab best` prints: the answer in one sentence, the ranked recipes, and what limits the answer.

    Each recipe has an interval of 95 %; the run is the unit, and noise is pooled over the repeats of all recipes. If
    the gap may be noise, the sentence names no winner.

    Args:
        runs: the frame of `titanlab.report.frames.sweep_frame`.
        by: `tps` (tokens per second of one device), `mfu`, or `memory` (the least).
        max_memory_gib: leave out recipes that need more GiB.
    """
    return "\n".join(ranking_lines(rank(records_of(runs), by=by, max_memory_gib=max_memory_gib)))
