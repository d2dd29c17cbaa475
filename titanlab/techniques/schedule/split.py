"""The split of a model into stages, such that the ranks' loads are balanced."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from titanlab.errors import ConfigError

# A search stops after this many tried cuts (some tenths of a second); the best result until then is used.
# Without the limit, a proof of optimality can take practically for ever if all pieces have different costs.
PATIENCE = 20_000
ROUNDING = 1e-9  # loads with a smaller relative difference are equal
# A rank's load may exceed the smallest possible by this share to make the largest stage smaller: ranks also wait for
# stages, and without slack the tiny cost of a norm would decide where blocks go.
SLACK = 0.01


def split(costs: Sequence[float], *, stages: int, placement: Sequence[int]) -> list[int]:
    """The first piece of every stage, such that the pipeline is balanced.

    First makes the largest load of a rank minimal; then makes the largest stage smaller, while the load may grow by
    `SLACK`. Every stage has at least one piece. The result is optimal for one stage per rank, and for several if the
    searches end within `PATIENCE`, as they do for models with equal blocks.

    Args:
        costs: of every piece, in the order of the forward pass; none is negative.

    Raises:
        ConfigError: fewer pieces than stages.
    """
    if stages > len(costs):
        rule = f"the model can be cut into {len(costs)} pieces at most, and the schedule has {stages} stages"
        cure = "try a smaller parallelism.pipeline or schedule.stages_per_rank"
        raise ConfigError("parallelism.split", None, rule, cure)
    even = _narrowest(costs, stages)
    if len(set(placement)) == stages:
        return even
    best = _lightest(even, costs, placement)
    load = _worst(best, costs, placement)[0] * (1 + SLACK)
    even_load, least_width = _worst(even, costs, placement)
    if even_load <= load:
        return even
    while (width := _worst(best, costs, placement)[1]) > least_width * (1 + ROUNDING):
        better = _search(costs, placement, load=load, width=width * (1 - ROUNDING))
        if better is None:
            break
        best = better
    return best


def _lightest(best: list[int], costs: Sequence[float], placement: Sequence[int]) -> list[int]:
    """The cuts whose most loaded rank has the least load; the search starts from the cuts `best`."""
    least = max(sum(costs) / len(set(placement)), max(costs))
    while (load := _worst(best, costs, placement)[0]) > least * (1 + ROUNDING):
        better = _search(costs, placement, load=load * (1 - ROUNDING), width=math.inf)
        if better is None:
            break
        best = better
    return best


def _worst(first: Sequence[int], costs: Sequence[float], placement: Sequence[int]) -> tuple[float, float]:
    """The largest load of a rank, and the cost of the largest stage."""
    loads = dict.fromkeys(placement, 0.0)
    widths = []
    for rank, begin, end in zip(placement, first, [*first[1:], len(costs)], strict=True):
        widths.append(math.fsum(costs[begin:end]))
        loads[rank] += widths[-1]
    return max(loads.values()), max(widths)


def _narrowest(costs: Sequence[float], stages: int) -> list[int]:
    """The cuts that make the largest stage as small as possible and, among such cuts, the sum of squared costs least.

    Dynamic programming from the last stage on; no stage may be larger than the least possible largest stage.
    """
    sums, pieces = [0.0, *accumulate(costs)], len(costs)
    width = _least_width(sums, stages) * (1 + ROUNDING)

    def square(begin: int, end: int) -> float:
        cost = sums[end] - sums[begin]
        return cost * cost if cost <= width else math.inf

    # By piece: the first end at which a stage that begins there is too large. A stage of one piece is never too large.
    beyond = [min(pieces, max(begin + 2, bisect_right(sums, sums[begin] + width) + 1)) for begin in range(pieces)]
    # By piece: the squared cost of a stage that begins there, for each end. They are lists, so that loops run in C.
    squares = [[square(begin, end) for end in range(begin + 1, beyond[begin])] for begin in range(pieces)]
    # By stage: the last piece with which the stage can begin if no earlier stage is too large.
    last = [0]
    for _ in range(stages - 1):
        last.append(beyond[last[-1]] - 1)
    # By piece: the least sum of squared costs of the stages after the current one, if they begin at this piece.
    least = [square(begin, pieces) for begin in range(pieces)] + [math.inf]
    ends: list[list[int]] = []
    for stage in reversed(range(stages - 1)):
        weights, chosen = [math.inf] * (pieces + 1), [pieces] * pieces
        for begin in range(stage, last[stage] + 1):
            sums_of_ends = list(map(operator.add, squares[begin], least[begin + 1 : beyond[begin]]))
            if sums_of_ends:
                weights[begin] = weight = min(sums_of_ends)
                chosen[begin] = begin + 1 + sums_of_ends.index(weight)
        least = weights
        ends.append(chosen)
    first = [0]
    for end in reversed(ends):
        first.append(end[first[-1]])
    return first


def _least_width(sums: Sequence[float], stages: int) -> float:
    """The smallest possible cost of the largest stage, over all ways to cut the pieces into stages.

    Args:
        sums: cost of the first n pieces together, for each n from none to all.
    """
    pieces = len(sums) - 1
    # `widths`: the costs of all runs of neighbouring pieces. A stage is such a run, so its cost is one of them.
    widths = sorted({sums[end] - sums[begin] for begin in range(pieces) for end in range(begin + 1, pieces + 1)})
    return widths[bisect_left(widths, True, key=lambda width: _fits(sums, stages, width * (1 + ROUNDING)))]


def _fits(sums: Sequence[float], stages: int, width: float) -> bool:
    """Whether `stages` stages of at most this cost can hold all pieces; fewer may do, as a stage can be cut again."""
    begin, pieces = 0, len(sums) - 1
    for _ in range(stages):
        begin = max(begin, bisect_right(sums, sums[begin] + width) - 1)
        if begin == pieces:
            return True
    return False


def _search(costs: Sequence[float], placement: Sequence[int], *, load: float, width: float) -> list[int] | None:
    """The first piece of each stage, such that no rank has more than `load` and no stage costs more than `width`.

    Searches depth first, and tries ends near an even share first. None: no such cuts exist, or `PATIENCE` tries failed.
    """
    stages, pieces = len(placement), len(costs)
    sums = [0.0, *accumulate(costs)]
    later = [placement[stage + 1 :].count(rank) for stage, rank in enumerate(placement)]
    # By stage: the ranks that have this stage or a later one.
    open_ranks = [tuple(dict.fromkeys(placement[stage:])) for stage in range(stages)]
    # `heavy`, by piece: how many pieces from it on cost at least the median. `may_fit` uses this as a sharper bound.
    median = sorted(costs)[pieces // 2]
    heavy = list(accumulate((cost >= median for cost in reversed(costs)), initial=0))[::-1]
    # By piece: the least number of stages for the pieces from this one on.
    fewest: list[float] = [0.0] * (pieces + 1)
    for begin in reversed(range(pieces)):
        end = bisect_right(sums, sums[begin] + min(width, load)) - 1
        fewest[begin] = 1 + fewest[end] if end > begin else math.inf
    infeasible: set[tuple[object, ...]] = set()
    tried = 0

    def may_fit(begin: int, left: Sequence[float]) -> bool:
        """Whether simple bounds allow the remaining pieces to fit into the room of the ranks that are left."""
        if sums[pieces] - sums[begin] > sum(left):
            return False
        return median <= 0 or heavy[begin] <= sum([int(room / median) for room in left])

    def possible_ends(stage: int, begin: int, room: float) -> list[int]:
        """Possible ends of the stage, the likeliest first."""
        if stage == stages - 1:
            return [pieces] if sums[pieces] - sums[begin] <= min(room, width) else []
        last = bisect_right(sums, sums[begin] + min(room, width)) - 1
        ends = range(begin + 1, min(last, pieces - (stages - stage - 1)) + 1)
        share = sums[begin] + room / (1 + later[stage])
        return sorted(ends, key=lambda end: abs(sums[end] - share))

    def search(stage: int, begin: int, room: dict[int, float]) -> list[int] | None:
        nonlocal tried
        if stage == stages:
            return [] if begin == pieces else None
        if tried >= PATIENCE or fewest[begin] > stages - stage:
            return None
        left = [room[rank] for rank in open_ranks[stage]]
        position = (stage, begin, *left)
        if position in infeasible or not may_fit(begin, left):
            return None
        rank = placement[stage]
        own = room[rank]
        for end in possible_ends(stage, begin, own):
            tried += 1
            room[rank] = own - (sums[end] - sums[begin])
            rest = search(stage + 1, end, room)
            if rest is not None:
                return [begin, *rest]
        room[rank] = own
        infeasible.add(position)
        return None

    return search(0, 0, dict.fromkeys(placement, load))
