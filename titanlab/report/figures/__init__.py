"""Figures of a sweep with matplotlib; each function returns one figure, without a window.

The argument `runs` is the frame of `sweep_frame`, or its rows; `steps` is the frame of `metrics_frame`, or its rows.
"""

from titanlab.report.figures.bars import memory_by_layout, outcomes, throughput_by_layout
from titanlab.report.figures.over_time import ExpertLoad, expert_load, loss_by_tokens
from titanlab.report.figures.scatter import estimate_against_measurement, pareto

__all__ = [
    "ExpertLoad",
    "estimate_against_measurement",
    "expert_load",
    "loss_by_tokens",
    "memory_by_layout",
    "outcomes",
    "pareto",
    "throughput_by_layout",
]
