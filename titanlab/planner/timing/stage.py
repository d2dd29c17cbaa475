"""The time of one stage of a pipeline."""

from __future__ import annotations

from typing import NamedTuple


class StageTime(NamedTuple):
    """Seconds of one stage for one microbatch: forward, gradients of inputs, gradients of weights."""

    forward: float
    inputs: float
    weights: float
