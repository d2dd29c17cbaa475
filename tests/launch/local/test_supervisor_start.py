"""How many supervisors have ended before they started a job, and what becomes of the jobs then."""

import json
import os
import time
from dataclasses import replace

import pytest

from tests.launch.slurm.printed import submission
from titanlab.launch.local import queue as supervisor_start
from titanlab.launch.local.queue import (
    LOG,
    LocalJob,
    give_up,
    last_error,
    latest_start,
    local_job,
    note_start,
    starts_in_vain,
    why_none,
    write_local_job,
)
from titanlab.launch.submission import write_submission
from titanlab.records.run_folder import RunFolder

WAITING = replace(submission("aa", runs=("one", "two"), launcher="local"), state="submitted")
DEAD = None


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / "jobs").mkdir()
    for name in WAITING.runs:
        (tmp_path / name).mkdir()
    write_submission(tmp_path, WAITING)
    return tmp_path


def started(sweep, *, pid=DEAD, in_vain=0, log=0):
    note_start(sweep, [WAITING], pid=pid, in_vain=in_vain, log=log)


def in_vain(sweep):
    return starts_in_vain(sweep, [WAITING])


def test_each_supervisor_that_ends_without_a_start_of_a_job_counts(sweep):
    assert in_vain(sweep) == 0
    started(sweep)
    assert in_vain(sweep) == 1
    started(sweep, in_vain=1)
    # One that died while it was about to start a job has not started it.
    write_local_job(sweep, "aa", 0, LocalJob(state="starting"))
    assert in_vain(sweep) == 2


@pytest.mark.parametrize("state", ["running", "ended", "cancelled"])
def test_a_job_that_gets_another_state_ends_the_count(sweep, state):
    started(sweep, in_vain=2)
    write_local_job(sweep, "aa", 0, LocalJob(state=state, pid=1))
    assert in_vain(sweep) == 0


def test_a_later_submission_ends_the_count(sweep):
    started(sweep, in_vain=2)
    assert starts_in_vain(sweep, [WAITING, replace(WAITING, token="bb")]) == 0


def test_a_supervisor_that_may_live_does_not_count(sweep, monkeypatch):
    started(sweep, pid=os.getpid(), in_vain=1)
    assert in_vain(sweep) == 1
    assert why_none(sweep) is None
    # Another process has its number now.
    monkeypatch.setattr(supervisor_start, "born_at", lambda pid: 1)
    assert in_vain(sweep) == 2
    monkeypatch.setattr(supervisor_start.socket, "gethostname", lambda: "another")
    assert in_vain(sweep) == 1


def test_a_supervisor_that_may_have_lived_for_long_ends_the_count(sweep, monkeypatch):
    started(sweep, in_vain=2)
    now = time.time()
    monkeypatch.setattr(supervisor_start.time, "time", lambda: now + 3600.0)
    assert in_vain(sweep) == 0


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "pid": "x", "born": 1}', '{"schema": 1, "a": 1}'],
)
def test_a_damaged_file_counts_nothing(sweep, text):
    (sweep / "jobs" / "supervisor.json").write_text(text)
    assert latest_start(sweep) is None
    assert in_vain(sweep) == 0


@pytest.mark.parametrize("figure", ['"log": 2.5', '"log": 1e300', f'"log": {10**30}', '"log": -5', '"in_vain": 0.5'])
def test_a_size_or_count_that_cannot_be_one_counts_nothing(sweep, figure):
    (sweep / "jobs" / LOG).write_text("ImportError: no x\n")
    file = sweep / "jobs" / "supervisor.json"
    file.write_text(f'{{"schema": 1, "pid": null, "born": null, {figure}}}')
    assert latest_start(sweep) is None
    assert last_error(sweep) == "ImportError: no x"


def test_jobs_that_wait_fail_with_the_last_error_of_the_log(sweep):
    log = sweep / "jobs" / LOG
    log.write_text("KeyError: of an earlier day\n")
    size = log.stat().st_size
    started(sweep, in_vain=2, log=size)
    assert last_error(sweep) is None
    with log.open("a") as file:
        file.write("ImportError: no x\n2026-11-26 09:20:40  supervisor 2374 of small\n")
    running = LocalJob(state="running", pid=1, born=1)
    write_local_job(sweep, "aa", 1, running)
    give_up(sweep, [WAITING])
    job = local_job(sweep, "aa", 0)
    assert job.state == "ended"
    assert job.cause == (
        "could not be started: the sweep's supervisor ended 3 times before it started a job; "
        "supervisor.log ends with: ImportError: no x"
    )
    assert local_job(sweep, "aa", 1) == running
    assert why_none(sweep) == "its supervisor has ended: ImportError: no x"


def test_a_run_in_somebodys_hands_has_not_failed(sweep):
    with RunFolder(sweep / "one").claim():
        give_up(sweep, [WAITING])
    assert local_job(sweep, "aa", 0) is None
    assert local_job(sweep, "aa", 1).state == "ended"


def test_starts_are_kept_in_a_file_that_others_may_read(sweep):
    started(sweep, pid=os.getpid(), in_vain=2, log=7)
    value = json.loads((sweep / "jobs" / "supervisor.json").read_text())
    assert (value["in_vain"], value["jobs"], value["log"]) == (2, {"waiting": 2}, 7)
