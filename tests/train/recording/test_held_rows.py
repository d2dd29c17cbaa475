"""Rows wait for a checkpoint before a tracker gets them, so that a rollback takes none back."""

from dataclasses import replace

import pytest

from tests import tiny
from tests.tracker.test_wandb import inspect
from tests.train.test_bad_steps import BAD, STEPS, attempt
from titanlab.costs import meter
from titanlab.techniques.tracker.contract import Tracker
from titanlab.techniques.tracker.trackers_schema import Wandb
from titanlab.train.tracking import HeldRows


class Taken(Tracker):
    """Keeps what it gets."""

    def __init__(self):
        self.rows, self.summary = [], None

    def start(self, run, *, warn):
        raise AssertionError("started twice")

    def log(self, step, metrics, *, time=None):
        assert time is not None
        self.rows.append((step, *metrics.values()))

    def finish(self, summary, *, exit_code=0):
        self.summary = summary


@pytest.mark.parametrize(
    ("newest", "taken"),
    [
        (2, [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]),
        # The checkpoint of step 4 is damaged, and that of step 2 is used: no step decreases.
        (4, [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (4, 40.0), (5, 50.0)]),
    ],
)
def test_rows_wait_for_their_checkpoint_and_repeated_steps_have_their_last(newest, taken):
    tracker, saved = Taken(), [0]
    held = HeldRows(tracker, lambda: saved[0])
    for step in (1, 2, 3):
        held.log(step, {"loss": step * 1.0})
    assert tracker.rows == []
    saved[0] = newest
    held.log(4, {"loss": 4.0}, time=7.0)
    assert tracker.rows == [(step, step * 1.0) for step in range(1, newest + 1)]
    held.go_back(2)
    for step in (3, 4, 5):
        held.log(step, {"loss": step * 10.0})
    held.finish({"outcome": "done"})
    assert (tracker.rows, tracker.summary) == (taken, {"outcome": "done"})


@pytest.mark.full
def test_wandb_has_the_losses_of_metrics_jsonl_after_a_rollback(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=STEPS, on_nan="rollback", every=2, keep=0)
    made = replace(made, tracker=Wandb(mode="offline", finish_seconds=120))
    run = tiny.begin(made)
    # The fourth step is bad, so the third one is repeated with other data.
    pool.run(1, attempt, made, run, (BAD + 1,))
    expected = {row["step"]: row[meter.LOSS] for row in run.metrics("train")}
    rows = [record["history"]["item"] for record in inspect(run.path) if record["type"] == "history"]
    found = {row["_step"]: row[meter.LOSS] for row in rows if meter.LOSS in row}
    assert list(found) == list(range(1, STEPS + 1))
    assert found == pytest.approx(expected)
