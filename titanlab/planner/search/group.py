"""Recipes of a space whose blocks take the same time."""

from __future__ import annotations

from typing import NamedTuple

from titanlab.costs.layout import Layout
from titanlab.planner.search.space import Choice, Point


class Group(NamedTuple):
    """Recipes that differ in their schedule, and in how data-parallel processes replicate or shard."""

    layouts: tuple[Layout, ...]
    microbatch: int
    ac: Choice
    precision: Choice
    compile: Choice

    @property
    def options(self) -> tuple[int, int, int]:
        """Its policy of checkpointing, precision and compilation, as the key of a table."""
        return id(self.ac.value), id(self.precision.value), id(self.compile.value)

    def point(self, layout: Layout, schedule: Choice) -> Point:
        """One of its recipes."""
        return Point(layout, self.microbatch, schedule, self.ac, self.precision, self.compile)
