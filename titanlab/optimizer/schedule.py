"""The learning rate as a function of the step, so that a resumed run needs no state for it."""

from __future__ import annotations

import math
from collections.abc import Callable

from titanlab.optimizer.schedule_schema import Schedule


def rate_factor(schedule: Schedule, *, step: int, steps: int) -> float:
    """The learning rate of step `step` (counted from 1) of `steps`, as a share of the peak."""
    warmup_steps = schedule.warmup(steps)
    if step <= warmup_steps:
        return step / warmup_steps
    decay_steps = round(steps * schedule.decay_fraction)
    # The decay never starts inside the warm-up.
    decay_start = max(steps - decay_steps, warmup_steps)
    if step <= decay_start:
        return 1.0
    progress = (step - decay_start) / (steps - decay_start)
    return schedule.floor + (1 - schedule.floor) * _DECAY[schedule.decay](progress)


_DECAY: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
