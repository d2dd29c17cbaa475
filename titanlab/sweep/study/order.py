"""The order in which the runs of a sweep start: repeats in turns, A B B A A B, with the control before, between, after.

A machine that becomes slower or faster meanwhile then does so for all recipes alike. Every second round is backwards:
over two rounds, a steady drift is the same for each recipe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from titanlab.sweep.study.point import Point
from titanlab.sweep.study.space import canonical_text


def starting_order(points: Sequence[Point]) -> list[int]:
    """The numbers of the points in the order in which their runs should start.

    Args:
        points: with repeats, in the order of the plan.
    """
    rounds: list[list[int]] = []
    seen = Counter[str]()
    for number, point in enumerate(points):
        if point.is_control:
            continue
        # `repeat` may be swept like any other key.
        recipe = canonical_text({key: value for key, value in point.values.items() if key != "repeat"})
        if seen[recipe] == len(rounds):
            rounds.append([])
        rounds[seen[recipe]].append(number)
        seen[recipe] += 1
    order = [number for index, round_ in enumerate(rounds) for number in (reversed(round_) if index % 2 else round_)]
    return _with_controls(order, rounds, [number for number, point in enumerate(points) if point.is_control])


def _with_controls(order: list[int], rounds: Sequence[Sequence[int]], controls: Sequence[int]) -> list[int]:
    """The order with the control first, last, and at equal distances: between rounds, if that fits their number."""
    if not controls:
        return order
    if len(controls) == len(rounds) + 1:
        ends = [sum(map(len, rounds[:index])) for index in range(len(controls))]
    else:
        ends = [len(order) * index // max(1, len(controls) - 1) for index in range(len(controls))]
    placed: list[int] = []
    for control, start, end in zip(controls, ends, [*ends[1:], len(order)], strict=True):
        placed += [control, *order[start:end]]
    return placed
