"""What train.py tells the recorder of a run. The recorder of ranks that do not log does nothing with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from titanlab.distributed.mesh import Mesh
from titanlab.records.outcome import Outcome
from titanlab.training.step_ends import NOW, StepEnd
from titanlab.training.totals import Totals


class Recorder:
    """The interface for train.py. This class does nothing: train.py needs no branch for ranks that do not log."""

    tracker_id: str | None = None
    # Waits for a checkpoint that is written in the background.
    until_saved: Callable[[], None] | None = None

    def start(self) -> None:
        """Note that the first step begins."""

    def started(self, seconds: Mapping[str, float]) -> None:
        """Record how long each phase up to the end of the first step has taken."""

    def loading(self) -> AbstractContextManager[None]:
        """Inside the block, the run waits for data."""
        return contextlib.nullcontext()

    def sending(self, mesh: Mesh) -> AbstractContextManager[None]:
        """Inside the block, a step computes and communicates; the first step is traced."""
        return contextlib.nullcontext()

    def saving(self) -> AbstractContextManager[None]:
        """Inside the block, a checkpoint is written."""
        return contextlib.nullcontext()

    def warn(self, text: str) -> None:
        """Report a problem that does not end the run."""

    def go_back(self, step: int) -> None:
        """Note that the run goes on from an earlier step."""

    def compared(self, metrics: Mapping[str, float], warning: str) -> None:
        """Take metrics that compare the ranks, and a warning if one is not empty."""

    def measured(self, kind: str, step: int, metrics: Mapping[str, float], lines: Sequence[str]) -> None:
        """Record a row of metrics of a kind of its own, and print lines."""

    def validating(self, step: int) -> AbstractContextManager[Callable[[float], None]]:
        """Inside the block, held-out sequences are evaluated; yields a function that takes their loss."""
        return contextlib.nullcontext(lambda loss: None)

    def record(self, step: int, totals: Totals, *, rate: float, tokens_seen: int, end: StepEnd = NOW) -> None:
        """Record a step's totals; `end`: when it has ended."""

    def finish(self, outcome: Outcome) -> Outcome:
        """Record the end of the run; return the outcome with its metrics."""
        return outcome
