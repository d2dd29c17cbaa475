"""Rows of metrics.jsonl with the load of each block's experts: few, because one of a large model has 80 KB."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from titanlab.training.balance import Load

# In a run, beside those of its first and its last step.
_MOST_ROWS = 20


class ExpertRows:
    """Sums the counts of tokens over steps, and writes them from time to time.

    A row has `counts`, tokens by block and expert over all ranks and microbatches, and `steps`, the number of steps
    that they are sums of. The steps of rows depend on the length of the run only: runs of several layouts compare.

    Args:
        steps: of the run.
        write: takes the step and the row.
    """

    def __init__(self, steps: int, write: Callable[[int, Mapping[str, Any]], None]) -> None:
        self._last, self._every = steps, -(-steps // _MOST_ROWS)
        self._write = write
        self._steps = 0
        self._counts = np.zeros((0, 0))

    def after_step(self, step: int, load: Load) -> None:
        """Add the counts of a step."""
        counts = np.asarray(load.counts)
        self._counts = counts if not self._steps else self._counts + counts
        self._steps += 1
        if step % self._every == 0 or step in (1, self._last):
            self.at_end(step)

    def go_back(self) -> None:
        """Forget the counts of steps that are done again."""
        self._steps = 0

    def at_end(self, step: int) -> None:
        """Write what was counted since the last row."""
        if self._steps:
            self._write(step, {"steps": self._steps, "counts": np.rint(self._counts).astype(int).tolist()})
        self._steps = 0
