"""The split is as good as the best of all there are."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.errors import ConfigError
from titanlab.techniques.schedule.split import split


def looped(*, ranks, stages_per_rank=1):
    return [*range(ranks)] * stages_per_rank


def v_shaped(*, ranks):
    return [*range(ranks), *reversed(range(ranks))]


PLACEMENTS = [
    *[looped(ranks=ranks) for ranks in (1, 2, 3, 5)],
    *[looped(ranks=ranks, stages_per_rank=2) for ranks in (1, 2, 3)],
    *[looped(ranks=2, stages_per_rank=3), v_shaped(ranks=2), v_shaped(ranks=3), [0, 1, 1, 0, 2]],
]


def worst(first, costs, placement):
    """Largest load of a rank, and largest stage."""
    stages = [sum(costs[begin:end]) for begin, end in zip(first, [*first[1:], len(costs)], strict=True)]
    loads = [sum(stage for stage, owner in zip(stages, placement, strict=True) if owner == rank) for rank in placement]
    return max(loads), max(stages)


@given(st.sampled_from(PLACEMENTS), st.lists(st.integers(0, 9), min_size=6, max_size=11))
def test_none_is_better(placement, costs):
    stages = len(placement)
    first = split(costs, stages=stages, placement=placement)
    assert first[0] == 0
    assert all(a < b for a, b in zip(first, [*first[1:], len(costs)], strict=True))
    others = itertools.combinations(range(1, len(costs)), stages - 1)
    assert worst(first, costs, placement) == min(worst([0, *each], costs, placement) for each in others)


@given(st.sampled_from(PLACEMENTS), st.lists(st.floats(0, 1, width=16), min_size=6, max_size=9))
def test_none_is_better_by_more_than_a_hundredth(placement, costs):
    first = split(costs, stages=len(placement), placement=placement)
    cuts = itertools.combinations(range(1, len(costs)), len(placement) - 1)
    others = [worst([0, *each], costs, placement) for each in cuts]
    # The largest stage is the least there is where no rank has a hundredth more than it must.
    allowed = 1.01 * min(load for load, _ in others)
    load, width = worst(first, costs, placement)
    assert load <= allowed * (1 + 1e-6)
    assert width <= min(width for load, width in others if load <= allowed * (1 - 1e-6)) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("layers", "head", "placement", "expected"),
    [
        # An embedding of 0.05 blocks, a norm of 0.01 and a head first and last: the last stage has fewer blocks.
        (16, 4.0, looped(ranks=4), [6, 5, 5, 3]),
        (32, 1.9, looped(ranks=4), [9, 8, 9, 9]),
        (126, 0.4, looped(ranks=8), [16, 16, 16, 16, 16, 16, 16, 17]),
        # In a V the rank with the embedding has the head too.
        (16, 2.0, v_shaped(ranks=2), [5, 5, 4, 5]),
    ],
)
def test_the_head_weighs(layers, head, placement, expected):
    costs = [0.05, *[1.0] * layers, 0.01, head]
    first = split(costs, stages=len(placement), placement=placement)
    assert [end - begin for begin, end in zip(first, [*first[1:], len(costs)], strict=True)] == expected


def test_large_models_are_split_in_no_time():
    costs = [0.02, *[1.0] * 126, 0.01, 0.4]
    for placement in (looped(ranks=16), v_shaped(ranks=16), looped(ranks=16, stages_per_rank=4)):
        begin = time.process_time()
        first = split(costs, stages=len(placement), placement=placement)
        assert time.process_time() - begin < 5
        load, _ = worst(first, costs, placement)
        assert load < 1.02 * sum(costs) / 16 + 1


def test_more_stages_than_pieces():
    with pytest.raises(ConfigError, match="3 pieces at most, and the schedule has 4 stages; try a smaller"):
        split([1, 1, 1], stages=4, placement=[0, 1, 2, 3])
