"""schedule=dualpipe_v: DualPipe over stages laid out as a V."""

from __future__ import annotations

import pytest

from tests.schedule.conftest import Schedule, words
from titanlab.errors import ConfigError
from titanlab.techniques.schedule.timeline import simulate


@pytest.mark.parametrize(("microbatches", "factor"), [(7, 2), (4, 2), (3, 3), (1, 8)])
def test_dualpipe_v_needs_a_microbatch_for_each_stage(microbatches, factor):
    rule = f"schedule=dualpipe_v: needs at least 8 microbatches, .* a step has {microbatches}; "
    with pytest.raises(ConfigError, match=rule + f"try schedule=zbv, or training.global_batch times {factor}"):
        Schedule("dualpipe_v").actions(4, microbatches)
    # Both ways out are ways out.
    Schedule("dualpipe_v").actions(4, microbatches * factor)
    Schedule("zbv").actions(4, microbatches)


def test_as_many_microbatches_as_stages_are_enough():
    assert Schedule("dualpipe_v").config.check_pipeline(ranks=4, microbatches=8) is None


def test_the_order_of_one_rank():
    assert words(Schedule("dualpipe_v").actions(1, 2)) == ["0F0 1F0 0F1 1B0 1F1 0B0 1B1 0I1 0W1"]


def test_the_order_of_two_ranks():
    """Warm-up, steady phase and cool-down; only the first and the last backward passes are split."""
    assert words(Schedule("dualpipe_v").actions(2, 4)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


def test_more_microbatches_lengthen_only_the_steady_phase():
    shares = []
    for microbatches in (8, 16, 32):
        schedule = Schedule("dualpipe_v")
        timeline = simulate(schedule.actions(4, microbatches), schedule.placement(4))
        shares.append((timeline.bubble_share * timeline.duration, max(timeline.peak_in_flight)))
    # The idle time and what is kept stay as they are.
    assert shares == [pytest.approx(shares[0])] * 3
