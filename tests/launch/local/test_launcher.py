"""launch=local: the states of jobs, and their cancellation, from the claims, attempts and results of their runs."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.launch.slurm.printed import submission
from tests.until import until
from titanlab.launch import JobState, write_submission
from titanlab.launch import local as supervising
from titanlab.launch.local import LOCK, LOG, LocalLauncher, jobs_in_order, wake
from titanlab.records import Outcome, OutcomeKind, RunFolder, Status, claimed
from titanlab.system import process_state, write_json

LAUNCHER = LocalLauncher()
HERE = socket.gethostname()


def local(*runs):
    return replace(submission(runs=runs, launcher="local"), job_id="aa")


@pytest.fixture
def sweep(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path


def begin(sweep, *, token="aa", host=HERE, started=100.0):
    """The run, of which a job has begun an attempt."""
    run = RunFolder(sweep / "one")
    attempt = run.begin_attempt({}, {})
    job = {"token": token, "index": 0, "nodes": [host], "started": started}
    write_json(run.attempt_folder(attempt) / "job.json", job)
    return run


def state(sweep, made=None):
    return LAUNCHER.states(sweep, [local("one") if made is None else made])["aa", 0]


def test_a_job_whose_run_nobody_has_waits(sweep):
    assert state(sweep) == JobState(state="pending", job_id="aa")
    with RunFolder(sweep / "one").claim():
        assert state(sweep) == JobState(state="running", raw="running", job_id="aa")
    # The attempt of another job.
    begin(sweep, token="bb")
    assert state(sweep).state == "pending"


def test_a_job_that_has_begun_an_attempt_runs_while_the_run_is_claimed(sweep):
    run = begin(sweep, started=time.time() - 5)
    with run.claim():
        found = state(sweep)
        assert (found.state, found.nodes) == ("running", (HERE,))
        assert 5 <= found.elapsed_seconds < 60
    # It was killed, and has left no result.
    assert state(sweep).state == "ended"
    assert not state(sweep).never_started


def test_the_time_of_a_job_is_that_from_start_to_end(sweep):
    begin(sweep).write_result(Outcome(kind=OutcomeKind.DONE, attempt=1, ended=107.5))
    assert state(sweep) == JobState(state="ended", raw="ended", elapsed_seconds=7.5, nodes=(HERE,), job_id="aa")


def test_a_result_since_the_submission_ends_a_job_that_waits(sweep):
    run, made = RunFolder(sweep / "one"), replace(local("one"), created=200.0)
    run.write_result(Outcome(kind=OutcomeKind.HANG, ended=100.0))
    assert state(sweep, made).state == "pending"
    run.write_result(Outcome(kind=OutcomeKind.CANCELLED, ended=300.0))
    assert state(sweep, made).never_started
    run.write_result(Outcome(kind=OutcomeKind.DONE, ended=100.0))
    assert state(sweep, made).state == "ended"


@pytest.mark.parametrize("lost", ["folder", "result"])
def test_a_run_that_cannot_be_read_is_not_started(sweep, lost):
    if lost == "folder":
        (sweep / "one").rmdir()
    else:
        (sweep / "one" / "result.json").write_text("{")
    assert state(sweep).state == "ended"


def test_a_job_whose_launcher_was_killed_runs_until_its_first_rank_has_ended(sweep):
    run = begin(sweep)
    run.write_status(Status(state="saving", pid=os.getppid()))
    assert state(sweep).state == "running"
    run.write_status(Status(state="saving", pid=2**22 + 1))
    assert state(sweep).state == "ended"


@pytest.mark.parametrize(
    ("word", "updated", "found"),
    [("running", 90, "ended"), ("running", 30, "running"), ("ended", 30, "ended"), ("prepared", 30, "ended")],
)
def test_a_job_of_another_host_lives_as_long_as_it_is_heard_of(sweep, word, updated, found):
    """With a status so many seconds ago."""
    run = begin(sweep, host="other")
    run.write_status(Status(state=word, host="other", updated=time.time() - updated))
    assert state(sweep).state == found
    with run.claim():
        assert state(sweep).state == "running"


def test_a_job_that_waits_says_that_the_supervisor_has_ended_or_is_stopped(sweep):
    (sweep / "jobs").mkdir()
    log = sweep / "jobs" / LOG
    with claimed(sweep, "sweep", file=LOCK):
        assert state(sweep).reason is None
    assert state(sweep).reason == "its supervisor has ended"
    log.write_text("KeyError: of an earlier day\n2026-11-26 09:20:40  supervisor 2374 of small\n")
    assert state(sweep).reason == "its supervisor has ended"
    log.write_text("2026-11-26 09:20:40  supervisor 2374 of small\nImportError: no x\n\n")
    assert state(sweep).reason == "its supervisor has ended: ImportError: no x"
    supervisor = subprocess.Popen(["sleep", "600"])
    with claimed(sweep, "sweep", file=LOCK):
        (sweep / LOCK).write_text(f"process {supervisor.pid} on {HERE}")
        supervisor.send_signal(signal.SIGSTOP)
        until(lambda: process_state(supervisor.pid) == "T")
        said = f"its supervisor, process {supervisor.pid}, is stopped: `kill -CONT {supervisor.pid}` lets it go on"
        assert state(sweep).reason == said
    supervisor.kill()
    supervisor.wait()
    (sweep / LOCK).write_text("process 1 on other")
    assert state(sweep).reason is None
    begin(sweep).write_result(Outcome(kind=OutcomeKind.HANG, attempt=1))
    assert state(sweep).reason is None


@pytest.mark.parametrize(
    ("holder", "is_claimed", "told", "signals"),
    [
        (f"process 1 on {HERE}", True, [], [(1, signal.SIGINT)]),
        (f"process 1 on {HERE}", False, [], []),
        ("process 1 on other", True, ["one runs on other: cancel it there"], []),
        (None, False, [], []),
    ],
)
def test_the_process_that_has_the_run_is_told_to_end(sweep, monkeypatch, holder, is_claimed, told, signals):
    lines, sent, run = [], [], RunFolder(sweep / "one")
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))

    def cancel():
        if holder is not None:
            (run.path / ".claim").write_text(holder)
        LAUNCHER.cancel(sweep, [(local("one", "two"), 0)], lines.append, is_gentle=True)

    if is_claimed:
        with run.claim():
            cancel()
    else:
        cancel()
    assert (lines, sent) == (told, signals)


def waiting(token="aa", *runs, created=1.0):
    return submission(token, runs=runs or ("one",), launcher="local", created=created)


def test_the_jobs_of_a_supervisor_that_cannot_start_have_failed(tmp_path, monkeypatch):
    real = sys.executable
    monkeypatch.setattr(sys, "executable", str(tmp_path / "deleted" / "python"))
    write_submission(tmp_path, waiting())
    (tmp_path / "one").mkdir()
    assert wake(tmp_path)
    result = RunFolder(tmp_path / "one").result()
    assert (result.kind, result.attempt) == (OutcomeKind.CRASH, 0)
    assert result.cause.startswith("could not be started: the sweep's supervisor has ended; supervisor.log ends with: ")
    assert str(tmp_path / "deleted" / "python") in result.cause
    assert not wake(tmp_path)
    # What is submitted later is tried again, and its code may be damaged.
    monkeypatch.setattr(sys, "executable", real)
    (tmp_path / "code" / "titanlab").mkdir(parents=True)
    (tmp_path / "code" / "titanlab" / "__init__.py").write_text("raise ImportError('no x')\n")
    (tmp_path / "two").mkdir()
    write_submission(tmp_path, waiting("bb", "two", created=2.0))
    assert wake(tmp_path)
    assert RunFolder(tmp_path / "two").result().cause.endswith("ends with: ImportError: no x")
    assert len((tmp_path / "jobs" / LOG).read_text().splitlines()) > 2


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
    environment = supervising._environment(tmp_path, replace(waiting(), code="code/1"))
    paths = [f"{tmp_path}/code/1", *(each.format(sweep=tmp_path) for each in others)]
    assert (environment["PYTHONPATH"], environment["PYTHONSAFEPATH"]) == (os.pathsep.join(paths), "1")


def test_only_submissions_to_this_launcher_count(tmp_path):
    for each in (replace(local("one"), token="bb"), submission("cc")):
        write_submission(tmp_path, each)
    assert [job.key for job in jobs_in_order(tmp_path)] == [("bb", 0)]
