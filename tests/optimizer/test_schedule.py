"""The learning rate over a run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlab.techniques.optimizer.contract import DECAYS, Schedule, rate_factor


@pytest.mark.parametrize("decay", DECAYS)
def test_warm_up_stable_decay(decay):
    schedule = Schedule(warmup_steps=10, decay_fraction=0.2, decay=decay, floor=0.1)
    rates = [rate_factor(schedule, step=step, steps=100) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:80] == [1.0] * 71
    assert rates[99] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[79:], rates[80:], strict=False))


def test_the_middle_of_each_decay():
    middle = {
        decay: rate_factor(Schedule(warmup_steps=0, decay_fraction=1.0, decay=decay, floor=0.0), step=50, steps=100)
        for decay in DECAYS
    }
    assert middle == pytest.approx({"linear": 0.5, "cosine": 0.5, "sqrt": 1 - 0.5**0.5})


@settings(deadline=None, max_examples=200)
@given(
    steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    fraction=st.floats(0, 1),
    floor=st.floats(0, 1),
    decay=st.sampled_from(sorted(DECAYS)),
)
def test_the_rate_stays_between_zero_and_the_peak(steps, warmup, fraction, floor, decay):
    schedule = Schedule(warmup_steps=min(warmup, steps), decay_fraction=fraction, decay=decay, floor=floor)
    for step in range(1, steps + 1):
        assert 0 < rate_factor(schedule, step=step, steps=steps) + 1e-12 <= 1 + 1e-9


@pytest.mark.parametrize(("steps", "warmup"), [(1, 1), (9, 1), (20, 2), (199, 19), (200, 200), (100_000, 200)])
def test_a_warm_up_that_is_left_open_takes_200_steps_or_a_tenth_of_a_shorter_run(steps, warmup):
    assert Schedule().warmup(steps) == warmup
    assert rate_factor(Schedule(), step=warmup, steps=steps) == 1.0
    # What is given is meant.
    assert Schedule(warmup_steps=200).warmup(steps) == 200
