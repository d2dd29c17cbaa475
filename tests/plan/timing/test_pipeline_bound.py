"""The bound of a pipeline's idle time: no simulation is ever shorter, and by hand it is what it should be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.conftest import KINDS, Schedule
from titanlab.plan.pipeline_time import StageTime, least_idle
from titanlab.techniques.schedule.action import Kind
from titanlab.techniques.schedule.published_schema import OneFOneB
from titanlab.techniques.schedule.timeline import simulate

SECONDS = st.floats(0.1, 3.0)


@given(st.data(), st.sampled_from(KINDS), st.integers(2, 5), st.integers(1, 3), st.integers(1, 16))
def test_no_simulation_is_shorter(data, kind, ranks, stages_per_rank, microbatches):
    schedule = Schedule(kind, stages_per_rank)
    if kind == "dualpipe_v":
        microbatches += 2 * ranks
    placement = schedule.placement(ranks)
    stages = tuple(StageTime(*data.draw(st.tuples(SECONDS, SECONDS, SECONDS))) for _ in placement)
    durations = {
        Kind.FORWARD: [stage.forward for stage in stages],
        Kind.BACKWARD: [stage.inputs + stage.weights for stage in stages],
        Kind.INPUT: [stage.inputs for stage in stages],
        Kind.WEIGHT: [stage.weights for stage in stages],
    }
    whole = simulate(schedule.actions(ranks, microbatches), placement, durations).duration
    busiest = max(
        microbatches * sum(sum(stage) for stage, owner in zip(stages, placement, strict=True) if owner == rank)
        for rank in range(ranks)
    )
    idle = least_idle(schedule.config, tuple(placement), stages, microbatches)
    assert 0 <= idle <= (whole - busiest) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (4, 8), (8, 3)])
def test_equal_stages_idle_as_the_formula_says(ranks, microbatches):
    """(p − 1)·(F + B): arXiv 2104.04473, section 2.2. The bound is exact."""
    stages = (StageTime(1.0, 1.0, 1.0),) * ranks
    idle = least_idle(OneFOneB(), tuple(range(ranks)), stages, microbatches)
    assert idle == pytest.approx((ranks - 1) * 3.0)
