"""Whether there is work for a sweep's supervisor, and with which code it starts."""

import os
import sys
from dataclasses import replace

import pytest

from tests.launch.slurm.printed import submission
from tests.until import until
from titanlab.launch.local.queue import (
    LOCK,
    LOG,
    LocalJob,
    has_work,
    latest_start,
    local_job,
    local_submissions,
    python_environment,
    wake,
    write_local_job,
)
from titanlab.launch.submission import write_submission
from titanlab.records.claim import claimed


def local(token="aa", *runs, created=1.0):
    return submission(token, runs=runs or ("one",), launcher="local", created=created)


def test_only_submissions_to_this_launcher_count(tmp_path):
    for each in (local("bb", created=2.0), local("aa"), submission("cc")):
        write_submission(tmp_path, each)
    assert [each.token for each in local_submissions(tmp_path)] == ["aa", "bb"]
    assert local_submissions(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("states", "work"),
    [
        ((None,), True),
        (("starting",), True),
        (("running",), True),
        (("ended",), False),
        (("cancelled",), False),
        (("ended", None), True),
        (("ended", "cancelled"), False),
    ],
)
def test_there_is_work_until_every_job_has_ended(tmp_path, states, work):
    write_submission(tmp_path, local("aa", *(f"run{index}" for index in range(len(states)))))
    for index, state in enumerate(states):
        if state is not None:
            write_local_job(tmp_path, "aa", index, LocalJob(state=state))
    assert has_work(tmp_path) is work


def test_jobs_of_another_launcher_are_no_work(tmp_path):
    write_submission(tmp_path, submission())
    assert not has_work(tmp_path)
    assert not wake(tmp_path)


def test_a_supervisor_that_runs_reads_new_submissions_itself(tmp_path):
    write_submission(tmp_path, local())
    with claimed(tmp_path, "sweep", file=LOCK):
        assert not wake(tmp_path)
    assert not (tmp_path / "jobs").exists()


def test_a_supervisor_that_cannot_start_is_started_three_times_and_then_its_jobs_have_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "deleted" / "python"))
    write_submission(tmp_path, local())
    starts = []
    for _ in range(6):
        starts.append(wake(tmp_path))
        until(lambda: not latest_start(tmp_path).may_live)
    assert starts == [True, True, True, False, False, False]
    assert len((tmp_path / "jobs" / LOG).read_text().splitlines()) == 3
    cause = local_job(tmp_path, "aa", 0).cause
    assert "ended 3 times before it started a job" in cause
    assert str(tmp_path / "deleted" / "python") in cause
    # What is submitted later is tried again.
    write_submission(tmp_path, local("bb", created=2.0))
    assert wake(tmp_path)


@pytest.mark.parametrize(
    ("inherited", "others"),
    [
        (None, []),
        ("", []),
        ("/mine:/other", ["/mine", "/other"]),
        (":/mine:", ["/mine"]),
        # Snapshots of earlier submissions of this sweep must not be found after the newest.
        ("{sweep}/code/older:/mine", ["/mine"]),
        ("{sweep}/codex:{sweep}/code", ["{sweep}/codex", "{sweep}/code"]),
    ],
)
def test_the_snapshot_is_before_the_users_own_modules(tmp_path, monkeypatch, inherited, others):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if inherited is not None:
        monkeypatch.setenv("PYTHONPATH", inherited.format(sweep=tmp_path))
    environment = python_environment(tmp_path, replace(local(), code="code/1"))
    assert environment == {
        "PYTHONPATH": os.pathsep.join([f"{tmp_path}/code/1", *(each.format(sweep=tmp_path) for each in others)]),
        "PYTHONSAFEPATH": "1",
    }
