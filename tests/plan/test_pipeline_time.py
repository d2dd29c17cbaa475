"""A pipeline's time: the shorter simulation agrees with that of all actions, and no simulation is below the bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.recipes import made
from tests.schedule.conftest import KINDS, Schedule
from titanlab.plan import machine_of
from titanlab.plan.pipeline_time import (
    Stages,
    StageTime,
    durations_of,
    least_idle,
    pipeline_time,
    simulated_time,
)
from titanlab.plan.step_time import step_time
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.schedule.action import simulate
from titanlab.techniques.schedule.published_schema import ZBV, GPipe, Interleaved1F1B, InterleavedZeroBubble, OneFOneB

# Fewer blocks than 405B has, because the search for a balanced split takes seconds; not divisible by the stages.
BLOCKS_OF_405B = Llama(dim=16384, layers=31, heads=128, kv_heads=8, ffn_dim=53248, vocab_size=128256)
# Recipes are ranked by the shorter simulation; layouts that differ by less than this are simulated in full.
AGREEMENT = 0.01


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 4), (4, 17), (8, 8), (8, 32), (8, 65)])
@pytest.mark.parametrize("schedule", [OneFOneB(), GPipe()], ids=lambda schedule: schedule.kind)
def test_one_stage_a_rank_by_hand(schedule, ranks, microbatches):
    """(m + p − 1)·(F + B): arXiv 2104.04473, section 2.2."""
    stages = Stages([StageTime(1.0, 1.0, 2.0)] * ranks, range(ranks))
    for estimate in (simulated_time, pipeline_time):
        found = estimate(schedule, stages, ranks=ranks, microbatches=microbatches, transfer=0.0)
        assert found.seconds == pytest.approx((microbatches + ranks - 1) * 4.0, rel=1e-9)
        assert found.sending == 0.0


def test_sending_delays_the_first_and_the_last_microbatch():
    stages = Stages([StageTime(1.0, 1.0, 1.0)] * 4, range(4))
    found = simulated_time(GPipe(), stages, ranks=4, microbatches=8, transfer=0.01)
    # Three hops forward and three back.
    assert found.sending == pytest.approx(0.06, rel=1e-9)
    short = pipeline_time(GPipe(), stages, ranks=4, microbatches=8, transfer=0.01)
    assert short.sending == pytest.approx(0.06, rel=1e-3)


@pytest.mark.parametrize(
    "schedule",
    [
        OneFOneB(),
        Interleaved1F1B(stages_per_rank=2),
        Interleaved1F1B(stages_per_rank=3),
        InterleavedZeroBubble(stages_per_rank=2),
        ZBV(),
    ],
    ids=lambda schedule: f"{schedule.kind}-{getattr(schedule, 'stages_per_rank', 1)}",
)
@pytest.mark.parametrize(
    ("ranks", "microbatches", "ac"),
    [(2, 3, NoCheckpointing()), (4, 17, FullCheckpointing()), (4, 36, FullCheckpointing()), (4, 33, NoCheckpointing())],
)
def test_the_shorter_simulation_agrees(schedule, ranks, microbatches, ac):
    recipe = made(
        model=BLOCKS_OF_405B, shard=4, tensor=8, pipeline=ranks, batch=4 * microbatches, schedule=schedule, ac=ac
    )
    machine = machine_of(recipe)
    whole = step_time(recipe, machine, pipeline=simulated_time).seconds
    assert step_time(recipe, machine).seconds == pytest.approx(whole, rel=AGREEMENT)


def test_more_microbatches_and_more_stages_mean_a_smaller_bubble():
    def bubble(batch, schedule):
        recipe = made(model=BLOCKS_OF_405B, shard=8, tensor=8, pipeline=4, batch=batch, schedule=schedule)
        found = step_time(recipe, machine_of(recipe), pipeline=simulated_time)
        return found.parts["bubble"] / found.seconds

    assert bubble(128, OneFOneB()) < bubble(64, OneFOneB()) < bubble(32, OneFOneB())
    assert bubble(32, Interleaved1F1B(stages_per_rank=4)) < bubble(32, OneFOneB())


SECONDS = st.floats(0.1, 3.0)


@given(st.data(), st.sampled_from(KINDS), st.integers(2, 5), st.integers(1, 3), st.integers(1, 16))
def test_no_simulation_is_shorter(data, kind, ranks, stages_per_rank, microbatches):
    schedule = Schedule(kind, stages_per_rank)
    if kind == "dualpipe_v":
        microbatches += 2 * ranks
    placement = schedule.placement(ranks)
    stages = tuple(StageTime(*data.draw(st.tuples(SECONDS, SECONDS, SECONDS))) for _ in placement)
    whole = simulate(schedule.actions(ranks, microbatches), placement, durations_of(stages)).duration
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
