"""The standing of a run: its folder against what the scheduler says of its job."""

import pytest

from tests.sweep.made import Made, begin, end, word
from titanlab.errors import ConfigError
from titanlab.records import RunFolder
from titanlab.sweep.enqueue import standing, supersede
from titanlab.sweep.sweep_folder import jobs_of


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path / "runs")


def stands(made, run, said=None):
    """The standing, where the scheduler says a word of the run's latest job; None: it does not know the job."""
    job = jobs_of(made.folder, made.folder.submissions()).get(run.path.name)
    states = {(job[0].token, job[1]): word(said)} if job is not None and said is not None else {}
    return standing(run, job, states)


@pytest.mark.parametrize(
    ("kind", "expected"), [("done", ("done", "done")), ("oom", ("ended", "oom")), ("preempted", ("ended", "preempted"))]
)
def test_a_run_that_was_started_by_hand_stands_by_its_result(made, kind, expected):
    begin(run := made.run("a"))
    end(run, kind)
    assert stands(made, run) == expected


def test_a_run_that_is_claimed_runs(made):
    run = made.run("a")
    with run.claim():
        assert stands(made, run) == ("running", None)
    made.submit(run)
    with run.claim():
        assert stands(made, run, "ended") == ("running", None)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("pending", ("queued", None)),
        ("requeued", ("queued", None)),
        ("running", ("running", None)),
        # It may still be in the queue: it is not submitted again.
        ("unknown", ("queued", None)),
        (None, ("queued", None)),
        ("ended", ("ended", None)),
    ],
)
def test_a_job_without_a_result_stands_by_the_schedulers_word(made, said, expected):
    run = made.run("a")
    made.submit(run)
    assert stands(made, run, said) == expected


@pytest.mark.parametrize("said", [None, "unknown", "pending", "running", "ended"])
def test_a_run_that_is_done_is_done_whatever_the_scheduler_says(made, said):
    run = made.run("a")
    made.submit(run, created=1500.0)
    begin(run)
    end(run, ended=1600.0)
    assert stands(made, run, said) == ("done", "done")


@pytest.mark.parametrize(
    ("kind", "ended", "said", "expected"),
    [
        # The scheduler has forgotten a job that was cancelled in the queue.
        ("cancelled", 2000.0, "unknown", ("ended", "cancelled")),
        ("oom", 2000.0, None, ("ended", "oom")),
        ("oom", 2000.0, "ended", ("ended", "oom")),
        # The result is of an earlier job.
        ("oom", 1000.0, "unknown", ("queued", None)),
        ("oom", 1000.0, "ended", ("ended", "oom")),
        # It may have put itself back into the queue.
        ("preempted", 2000.0, "unknown", ("queued", None)),
        ("walltime", 2000.0, None, ("queued", None)),
        ("node_fail", 2000.0, "unknown", ("queued", None)),
        ("walltime", 2000.0, "ended", ("ended", "walltime")),
        ("oom", 2000.0, "pending", ("queued", None)),
        ("oom", 2000.0, "running", ("running", None)),
    ],
)
def test_a_result_counts_where_the_scheduler_knows_nothing(made, kind, ended, said, expected):
    run = made.run("a")
    made.submit(run, created=1500.0)
    begin(run)
    end(run, kind, ended=ended)
    assert stands(made, run, said) == expected


def test_a_run_is_put_aside_under_the_next_number(made):
    for number in (1, 2):
        run = made.run("a", repeat=0)
        (run.path / "mark").write_text(str(number))
        supersede(made.folder, run)
        assert not run.path.exists()
        assert (made.folder.superseded / f"{run.path.name}.{number}" / "mark").read_text() == str(number)


def test_a_run_that_is_claimed_is_not_put_aside(made, monkeypatch):
    run = made.run("a")
    with run.claim():
        monkeypatch.setitem(RunFolder.claim.__kwdefaults__, "patience_seconds", 0.0)
        with pytest.raises(ConfigError):
            supersede(made.folder, RunFolder(run.path))
    assert run.path.is_dir()
    assert list(made.folder.superseded.iterdir()) == []
