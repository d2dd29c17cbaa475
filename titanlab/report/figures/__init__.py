"""Figures of a sweep with matplotlib; each function returns one figure, without a window."""

from titanlab.report.figures.bars import memory_by_layout, outcomes, throughput_by_layout
from titanlab.report.figures.over_time import ExpertLoad, expert_load, loss_by_tokens

__all__ = ["ExpertLoad", "expert_load", "loss_by_tokens", "memory_by_layout", "outcomes", "throughput_by_layout"]
