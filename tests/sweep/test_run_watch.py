"""Whether a run goes on: by its lock, its process, its job in the queue, and its outcome."""

import os
import time

import pytest

from tests.sweep.made import Made, begin, end
from titanlab.records import Status
from titanlab.sweep import RunWatch
from titanlab.sweep import watch as run_watch


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path / "runs")


def test_a_run_that_nobody_submitted(made):
    run = made.run("one")
    assert RunWatch(run).goes_on() == (False, "nobody has started it")
    begin(run)
    run.write_status(Status(state="running", attempt=1, pid=os.getpid()))
    assert RunWatch(run).goes_on() == (True, "")
    run.write_status(Status(state="running", attempt=1, host="another"))
    assert RunWatch(run).goes_on() == (True, "")
    late = RunWatch(run, now=lambda: time.time() + 1000)
    assert late.goes_on() == (False, "nobody works on it any more, and it left no result")
    with run.claim():
        assert late.goes_on() == (True, "")
    end(run, "walltime")
    assert RunWatch(run).goes_on() == (False, "ended: walltime")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"state": "queued", "queue_reason": "Resources"}, (True, "waits in the queue: Resources")),
        ({"state": "queued", "queue_reason": None}, (True, "waits in the queue")),
        ({"state": "running", "queue_reason": None}, (True, "")),
        ({"state": "ended", "outcome": "preempted", "cause": None}, (False, "ended: preempted")),
        ({"state": "missing", "outcome": None, "cause": "gone"}, (False, "missing: gone")),
        (None, (False, "is not in its sweep any more")),
    ],
)
def test_a_run_with_a_job_goes_on_as_its_queue_says(made, monkeypatch, row, expected):
    run = made.run("one")
    begin(run)
    end(run, "preempted")
    made.submit(run)
    asked = []

    def look():
        asked.append(1)
        return [] if row is None else [{"run": run.path.name, **row}]

    monkeypatch.setattr(run_watch, "look_at", lambda sweep: look)
    now = [0.0]
    watch = RunWatch(run, clock=lambda: now[0])
    assert watch.goes_on() == watch.goes_on() == expected
    assert len(asked) == 1
    now[0] += 10
    watch.goes_on()
    assert len(asked) == 2


def test_an_end_that_is_final_asks_no_queue(made, monkeypatch):
    run = made.run("one")
    begin(run)
    end(run, "done")
    made.submit(run)
    monkeypatch.setattr(run_watch, "look_at", lambda sweep: pytest.fail)
    assert RunWatch(run).goes_on() == (False, "ended: done")
