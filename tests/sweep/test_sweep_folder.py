"""The folder of a sweep: what is found there, and how its runs stand."""

from __future__ import annotations

import json

import pytest

from tests.sweep.made import begin, end, word
from tests.sweep.studies import seeds, study
from titanlab.errors import ConfigError
from titanlab.launch import JobShape, Submission, drop_submission, write_submission
from titanlab.launch.submission import claim_sweep
from titanlab.recipe import to_mapping
from titanlab.records import RunFolder, create_run
from titanlab.sweep import SweepFolder
from titanlab.sweep.submit import standing, supersede
from titanlab.sweep.sweep_folder import jobs_of


@pytest.fixture
def folder(tmp_path):
    for planned in study(tmp_path / "runs", seeds(3)).planned:
        create_run(
            tmp_path / "runs",
            sweep="layouts",
            name=planned.recipe.name,
            identity=planned.identity,
            config=to_mapping(planned.recipe),
        )
    return SweepFolder(tmp_path / "runs" / "layouts")


def submission(created, *runs, **given):
    shape = JobShape(processes=1, tasks_per_node=1)
    return Submission(launcher="slurm", created=created, code="code/x", shape=shape, launch={}, runs=runs, **given)


def job_of(folder, run):
    return jobs_of(folder, folder.submissions()).get(run)


def test_the_latest_submission_has_a_run(folder):
    first, second = submission(1.0, "a", "b"), submission(2.0, "b", state="submitted", job_id="7")
    for each in (second, first):
        write_submission(folder.path, each)
    assert folder.submissions() == [first, second]
    assert job_of(folder, "a") == (first, 0)
    assert job_of(folder, "b") == (second, 0)
    assert job_of(folder, "c") is None
    drop_submission(folder.path, second)
    assert job_of(folder, "b") == (first, 1)
    (folder.path / "submissions" / "torn.json").write_text('{"schema": 1, "tok')
    assert folder.submissions() == [first]


def test_a_job_from_before_a_run_was_made_anew_is_not_its_job(folder):
    run, other, _ = folder.runs()
    before = submission(run.created() - 0.001, run.path.name, other.path.name, "gone")
    write_submission(folder.path, before)
    assert job_of(folder, run.path.name) is None
    assert job_of(folder, "gone") == (before, 2)
    write_submission(folder.path, after := submission(run.created(), run.path.name))
    assert job_of(folder, run.path.name) == (after, 0)
    # Folders of an earlier version do not say when they were made.
    identity = other.path / "identity.json"
    told = json.loads(identity.read_text())
    del told["created"]
    identity.write_text(json.dumps(told))
    assert job_of(folder, other.path.name) == (before, 1)


def test_one_process_at_a_time_submits(folder):
    with folder.claim():
        with pytest.raises(ConfigError, match=r"sweep=.*layouts: is in the hands of process \d+"):
            with claim_sweep(folder.path, patience_seconds=0.1):
                pass
    with claim_sweep(folder.path, patience_seconds=0.1):
        pass


def stands(made, run, said=None):
    """The standing, where the scheduler says a word of the run's latest job; None: it does not know the job."""
    job = jobs_of(made.folder, made.folder.submissions()).get(run.path.name)
    states = {(job[0].token, job[1]): word(said)} if job is not None and said is not None else {}
    return standing(run, job, states)


def test_a_run_that_is_claimed_runs(made):
    run = made.run("a")
    with run.claim():
        assert stands(made, run) == ("running", None)
    made.submit(run)
    with run.claim():
        assert stands(made, run, "ended") == ("running", None)


@pytest.mark.parametrize(
    ("kind", "ended", "said", "expected"),
    [
        # Started by hand: its result counts.
        ("done", 2000.0, "no job", ("done", "done")),
        ("oom", 2000.0, "no job", ("ended", "oom")),
        ("preempted", 2000.0, "no job", ("ended", "preempted")),
        # Without a result, the scheduler's word counts.
        (None, None, "pending", ("queued", None)),
        (None, None, "requeued", ("queued", None)),
        (None, None, "running", ("running", None)),
        # It may still be in the queue: it is not submitted again.
        (None, None, "unknown", ("queued", None)),
        (None, None, None, ("queued", None)),
        (None, None, "ended", ("ended", None)),
        # A run that is done is done, whatever the scheduler says.
        *(("done", 1600.0, said, ("done", "done")) for said in (None, "unknown", "pending", "running", "ended")),
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
def test_a_run_stands_by_its_result_and_by_the_schedulers_word(made, kind, ended, said, expected):
    run = made.run("a")
    if said != "no job":
        made.submit(run, created=1500.0)
    if kind is not None:
        begin(run)
        end(run, kind, ended=ended)
    assert stands(made, run, None if said == "no job" else said) == expected


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
