"""When a run goes back to its newest checkpoint, how often, and what it says of it."""

from __future__ import annotations

import pytest

from tests.checkpoint.one_process import ALONE
from tests.weights.saved import run_of, save
from titanlab.recipe import Training
from titanlab.records import Outcome, OutcomeKind
from titanlab.train.faults import Rollbacks

BAD = Outcome(kind=OutcomeKind.NAN, step=7, steps=20, cause="the loss of step 7 is nan")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@pytest.fixture
def made(tmp_path):
    """`made(limit)`: the rollbacks of a run without a checkpoint, its warnings, and the run with its recipe."""
    recipe, run = run_of(tmp_path)

    def rollbacks(limit=2, on_nan="rollback"):
        warnings = []
        training = Training(steps=20, seq_len=32, global_batch=12, on_nan=on_nan, nan_limit=limit)
        return Rollbacks(training, run, ALONE, warn=warnings.append), warnings

    rollbacks.save = lambda step: save(run, recipe.model, step=step)
    return rollbacks


def nothing():
    pass


def test_a_run_with_a_checkpoint_goes_back(made):
    made.save(4)
    rollbacks, warnings = made()
    assert rollbacks.may_follow(BAD, after=nothing)
    assert warnings == []


def test_a_save_under_way_counts(made):
    rollbacks, _ = made()
    assert rollbacks.may_follow(BAD, after=lambda: made.save(4))


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(made):
    rollbacks, warnings = made()
    assert not rollbacks.may_follow(BAD, after=nothing)
    assert warnings == ["the loss of step 7 is nan; there is no checkpoint to go back to"]


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_run_that_is_to_stop_or_to_skip_does_not_go_back(made, on_nan):
    made.save(4)
    rollbacks, warnings = made(on_nan=on_nan)
    # Nor does it wait for a save.
    assert not rollbacks.may_follow(BAD, after=None)
    assert warnings == []


def test_rollbacks_are_counted_up_to_their_limit(made):
    made.save(4)
    rollbacks, warnings = made(limit=2)
    for number in (1, 2):
        assert rollbacks.may_follow(BAD, after=nothing)
        outcome = rollbacks.note(BAD, [], to=4)
        assert (outcome.kind, outcome.step, outcome.steps, outcome.cause) == (OutcomeKind.DONE, 4, 20, None)
        assert warnings[-1].endswith(f"(rollback {number} of at most 2)")
    assert not rollbacks.may_follow(BAD, after=nothing)


@pytest.mark.parametrize(("to", "between"), [(6, "step 7"), (4, "steps 5 to 7"), (0, "steps 1 to 7")])
def test_the_data_that_is_left_out_is_named(made, to, between):
    rollbacks, warnings = made()
    rollbacks.note(BAD, ["step-00000006 is damaged"], to=to)
    text = f"{BAD.cause}; back to the checkpoint of step {to}, without the data of {between} (rollback 1 of at most 2)"
    assert warnings == ["step-00000006 is damaged", text]
