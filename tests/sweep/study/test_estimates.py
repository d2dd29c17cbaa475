"""A study without the runs that do not fit into memory, by estimates that are given."""

import pytest

from tests.sweep.studies import seeds, study
from titanlab.errors import ConfigError
from titanlab.planner.estimate import Estimate
from titanlab.sweep.study import estimates
from titanlab.sweep.study.estimates import fitting


@pytest.fixture
def reserved(monkeypatch):
    """Bytes that a run would reserve of its device's 80 GB, by its seed; of other seeds there is no estimate."""
    known = {}

    def estimate_of(recipe):
        if recipe.seed not in known:
            return None
        return Estimate(hours=1.0, reserved_bytes=known[recipe.seed], limit_bytes=80e9, checkpoint_bytes=1)

    monkeypatch.setattr(estimates, "estimate_of", estimate_of)
    return known


def test_runs_that_do_not_fit_are_dropped_with_their_bytes(tmp_path, reserved):
    reserved.update({0: 80_000_000_000, 1: 93_600_000_000})
    given = study(tmp_path, seeds(3), dropped=[{"seed": 9}])
    kept = fitting(given)
    # The one of seed 2 has no estimate, and what is not known is not left out.
    assert [planned.recipe.seed for planned in kept.planned] == [0, 2]
    assert [(each.point.values, each.stage) for each in kept.dropped] == [
        ({"seed": 9}, "rule"),
        ({"shard": 1, "seed": 1}, "memory"),
    ]
    assert kept.dropped[1].reason == "would reserve about 94 GB of a device's 80.0 GB"
    assert (kept.name, kept.definition) == (given.name, given.definition)


def test_a_study_whose_runs_all_fit_stays_as_it_is(tmp_path, reserved):
    reserved.update({0: 1, 1: 2})
    given = study(tmp_path, seeds(2))
    assert fitting(given) == given


def test_a_study_of_which_nothing_fits_is_refused(tmp_path, reserved):
    reserved.update({0: 90e9, 1: 91e9})
    with pytest.raises(ConfigError) as raised:
        fitting(study(tmp_path, seeds(2)))
    assert str(raised.value) == (
        "--prune=true: none of 2 runs fits into memory; would reserve about 91 GB of a device's 80.0 GB; "
        "leave it out, or see what fits: titanlab plan"
    )
