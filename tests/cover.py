"""Which rows of a product CI runs most often: enough that every pair of options that the product has appears in a row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import combinations
from typing import TypeVar

import pytest

Row = TypeVar("Row")
Options = Callable[[Row], Collection[Hashable]]


def pairs(options: Collection[Hashable]) -> set[frozenset[Hashable]]:
    """All pairs of options of one row, and each option alone."""
    return {frozenset(pair) for size in (1, 2) for pair in combinations(options, size)}


def cover(
    rows: Sequence[Row], options: Options[Row], *, always: Collection[Row], cost: Callable[[Row], float]
) -> list[Row]:
    """Rows beside `always` with which every pair of options of any row appears: the most new pairs for the cost first.

    Args:
        options: what a row combines, say its axes, its schedule and its precision.
        always: rows that run anyway.
        cost: of a row, in any unit.
    """
    missing = set().union(*(pairs(options(row)) for row in rows))
    missing -= set().union(*(pairs(options(row)) for row in always))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(options(row)) & missing) / cost(row))
        missing -= pairs(options(best))
        chosen.append(best)
    return chosen


def marks(row: Row, *, always: Collection[Row], covering: Collection[Row]) -> list[pytest.MarkDecorator]:
    """The layer of tests that runs a row: `make test`, or `make test-full`, whose covering rows CI runs more often."""
    if row in always:
        return []
    return [pytest.mark.full, pytest.mark.covering] if row in covering else [pytest.mark.full]
