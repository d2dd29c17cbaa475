"""Repeated reads of a sweep: files at every call, the scheduler only every few seconds."""

import pytest

from tests.sweep.made import begin, end, train, word
from titanlab.sweep import look_at
from titanlab.sweep import rows as look


@pytest.fixture
def asked(monkeypatch):
    """The times at which the scheduler was asked; it says that the first job runs, and that something is amiss."""
    times = []

    def reconcile(sweep, report):
        times.append(now[0])
        report("the scheduler is slow")
        return {(submission.token, 0): word("running", "RUNNING") for submission in sweep.submissions()}

    now = [0.0]
    monkeypatch.setattr(look, "reconcile", reconcile)
    return now, times


def test_a_scheduler_is_asked_every_ten_seconds_and_files_are_read_always(made, asked):
    now, times = asked
    run = made.run("a")
    made.submit(run, created=1500.0)
    rows = look_at(made.folder, clock=lambda: now[0])
    assert rows()[0]["state"] == "starting"
    begin(run)
    train(run, step=3)
    now[0] = 9.9
    assert (rows()[0]["state"], rows()[0]["step"]) == ("running", 3)
    assert times == [0.0]
    now[0] = 10.0
    end(run)
    assert rows()[0]["outcome"] == "done"
    assert times == [0.0, 10.0]


def test_without_a_scheduler_every_call_asks(made, asked):
    now, times = asked
    made.submit(made.run("a"), launcher="local")
    rows = look_at(made.folder, clock=lambda: now[0])
    for second in (0.0, 0.1, 0.2):
        now[0] = second
        assert rows()[0]["state"] == "starting"
    assert times == [0.0, 0.1, 0.2]


def test_a_job_that_is_submitted_later_is_asked_for(made, asked):
    now, times = asked
    run = made.run("a")
    rows = look_at(made.folder, clock=lambda: now[0])
    assert rows()[0]["state"] == "prepared"
    made.submit(run)
    assert rows()[0]["state"] == "starting"
    assert times == [0.0]


def test_a_message_is_told_once(made, asked):
    now, times = asked
    made.submit(made.run("a"))
    told = []
    rows = look_at(made.folder, told.append, clock=lambda: now[0])
    for second in (0.0, 20.0, 40.0):
        now[0] = second
        rows()
    assert (len(times), told) == (3, ["the scheduler is slow"])
