"""When the steps of a run have ended, by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class StepEnd(NamedTuple):
    """The end of a step.

    at: by `time.perf_counter`; None: now
    next_runs: whether the device already computes the next step
    """

    at: float | None = None
    next_runs: bool = False


NOW = StepEnd()


class StepEnds:
    """Tells when each step has ended on its device.

    A GPU computes a step while the host sends the next one, and its totals are read after that. The times of reading
    differ from those of computing wherever the host is slower than the GPU: before a validation or a checkpoint the
    last two steps are read at once, so that one of them would take no time. So a GPU's steps are timed by its events.

    Args:
        device: of this rank; it is waited for.
        clock: as of the meter.
    """

    def __init__(self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._last: torch.cuda.Event | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._last = torch.cuda.Event(enable_timing=True)
            self._last.record()
        self._at = clock()

    def after(self, event: torch.cuda.Event | None) -> float | None:
        """When the device reached the event at the end of a step; None: now.

        Args:
            event: it has been reached, and later than those of earlier calls; None: of a CPU.
        """
        if event is None or self._last is None:
            return None
        # From event to event: milliseconds in 32 bits are exact enough for a step, not for a day.
        self._at += self._last.elapsed_time(event) / 1e3
        self._last = event
        return self._at
