"""launch=local: the places of ranks, the states of jobs, and their cancellation, from the supervisor's records."""

import os
import signal
import socket
import subprocess
from dataclasses import replace

import pytest

from tests.launch.slurm.printed import submission
from tests.until import until
from titanlab.errors import ConfigError
from titanlab.launch.contract import JobState
from titanlab.launch.local.launcher import LocalLauncher
from titanlab.launch.local.queue import LOCK, LOG, LocalJob, local_job, note_start, write_local_job
from titanlab.records.claim import claimed
from titanlab.records.run_folder import RunFolder
from titanlab.system.processes import born_at, process_state

LAUNCHER = LocalLauncher()
HERE = socket.gethostname()


def local(*runs):
    return replace(submission(runs=runs, launcher="local"), job_id="aa")


@pytest.fixture
def sweep(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_the_file_of_a_submission_is_the_queue(sweep):
    made = local("one")
    assert LAUNCHER.submit(sweep, made) == LAUNCHER.find(sweep, made) == "aa"
    assert not LAUNCHER.has_scheduler


def test_a_process_that_nobody_has_started_is_a_job_of_its_own():
    place = LAUNCHER.place_in({"SUBMITIT_LOCAL_JOB_ID": "7", "SUBMITIT_LOCAL_NTASKS": "4"})
    assert (place.job_id, place.raw_job_id, place.nodes) == (str(os.getpid()), str(os.getpid()), (HERE,))
    assert (place.ranks.rank, place.ranks.world) == (0, 1)


def test_a_task_of_the_controller_is_one_of_its_ranks():
    environ = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7", "SUBMITIT_LOCAL_NTASKS": "4"}
    environ |= {"SUBMITIT_LOCAL_GLOBALID": "3", "SUBMITIT_LOCAL_LOCALID": "3"}
    place = LAUNCHER.place_in(environ)
    assert (place.launcher, place.job_id, place.restart, place.index) == ("local", "7", 0, None)
    ranks = place.ranks
    assert (ranks.rank, ranks.world, ranks.local_rank, ranks.local_world) == (3, 4, 3, 4)
    with pytest.raises(ConfigError, match="SUBMITIT_LOCAL_NTASKS=many"):
        LAUNCHER.place_in({**environ, "SUBMITIT_LOCAL_NTASKS": "many"})


def state(sweep, job, *, made=None):
    made = local("one") if made is None else made
    if job is not None:
        write_local_job(sweep, "aa", 0, job)
    return LAUNCHER.states(sweep, [made])["aa", 0]


def test_a_job_without_a_record_waits(sweep):
    assert state(sweep, None) == JobState(state="pending", job_id="aa")
    with RunFolder(sweep / "one").claim():
        assert state(sweep, None) == JobState(state="running", job_id="aa")


def test_the_time_of_a_job_is_that_from_start_to_end(sweep):
    ended = LocalJob(state="ended", pid=1, born=0, started=100.0, ended=107.5)
    assert state(sweep, ended) == JobState(state="ended", raw="ended", elapsed_seconds=7.5, nodes=(HERE,), job_id="aa")
    assert state(sweep, replace(ended, started=None)).elapsed_seconds is None
    assert state(sweep, LocalJob(state="cancelled", ended=1.0)).never_started
    assert not state(sweep, ended).never_started


def test_a_job_that_waits_says_why_there_is_no_supervisor(sweep):
    (sweep / "jobs").mkdir()
    note_start(sweep, [local("one")], pid=None, in_vain=0, log=0)
    (sweep / "jobs" / LOG).write_text("ImportError: no x\n")
    said = "its supervisor has ended: ImportError: no x"
    assert state(sweep, None).reason == state(sweep, LocalJob(state="starting")).reason == said
    assert state(sweep, LocalJob(state="ended", started=1.0)).reason is None
    with claimed(sweep, "sweep", file=LOCK):
        assert state(sweep, None).reason is None


def test_a_job_that_waits_says_that_the_supervisor_is_stopped(sweep):
    (sweep / "jobs").mkdir()
    supervisor = subprocess.Popen(["sleep", "600"])
    note_start(sweep, [local("one")], pid=supervisor.pid, in_vain=0, log=0)
    with claimed(sweep, "sweep", file=LOCK):
        supervisor.send_signal(signal.SIGSTOP)
        until(lambda: process_state(supervisor.pid) == "T")
        said = f"its supervisor, process {supervisor.pid}, is stopped: `kill -CONT {supervisor.pid}` lets it go on"
        assert state(sweep, None).reason == said
        supervisor.send_signal(signal.SIGCONT)
        until(lambda: process_state(supervisor.pid) == "S")
        assert state(sweep, None).reason is None
    supervisor.kill()
    supervisor.wait()


def test_a_job_failed_early_for_the_reason_that_is_recorded_or_printed(sweep):
    made = local("one", "two")
    assert LAUNCHER.early_end(sweep, made, 1) is None
    for index in (0, 1):
        (sweep / "jobs" / f"aa_{index}").mkdir(parents=True)
        (sweep / "jobs" / f"aa_{index}" / "77_0_log.err").write_text(f"ImportError: of job {index}\n")
    assert LAUNCHER.early_end(sweep, made, 1) == "ended before the run began: ImportError: of job 1"
    write_local_job(sweep, "aa", 1, LocalJob(state="ended", cause="could not be started: no x"))
    assert LAUNCHER.early_end(sweep, made, 1) == "could not be started: no x"


def test_a_number_of_a_process_that_was_born_later_is_another_process(sweep):
    alive = LocalJob(state="running", pid=1, born=born_at(1), started=1.0)
    assert state(sweep, alive).state == "running"
    assert state(sweep, replace(alive, born=-1)).state == "ended"


def test_a_job_that_starts_needs_a_supervisor(sweep):
    starting = LocalJob(state="starting")
    assert state(sweep, starting).state == "pending"
    with claimed(sweep, "sweep", file=LOCK):
        assert state(sweep, starting).state == "running"


def test_every_run_of_every_submission_has_a_state(sweep):
    made = [local("one", "two"), replace(local("one"), token="bb")]
    assert list(LAUNCHER.states(sweep, made)) == [("aa", 0), ("aa", 1), ("bb", 0)]
    assert LAUNCHER.states(sweep, []) == {}


def cancelled(sweep, job, *indices):
    """What is told, and the record that is left."""
    lines = []
    if job is not None:
        write_local_job(sweep, "aa", 0, job)
    LAUNCHER.cancel(sweep, [(local("one", "two"), index) for index in indices or (0,)], lines.append, is_gentle=True)
    return lines, local_job(sweep, "aa", 0)


@pytest.mark.parametrize("job", [None, LocalJob(state="starting")])
def test_a_job_that_waits_is_cancelled_by_its_record(sweep, job):
    lines, left = cancelled(sweep, job, 0, 1)
    assert (lines, left.state) == ([], "cancelled")
    assert left.ended is not None
    assert local_job(sweep, "aa", 1).state == "cancelled"


def test_a_job_that_runs_is_signalled(sweep, monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number.name)))
    running = LocalJob(state="running", pid=1, born=born_at(1), started=1.0)
    assert cancelled(sweep, running) == ([], running)
    assert sent == [(1, "SIGTERM")]


def test_a_job_that_has_ended_is_left_alone(sweep, monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *words: sent.append(words))
    for job in (LocalJob(state="ended", pid=1, born=born_at(1)), LocalJob(state="running", pid=1, born=-1)):
        assert cancelled(sweep, job) == ([], job)
    assert sent == []


def test_a_job_of_another_host_is_cancelled_there_or_recorded_as_ended(sweep):
    there = LocalJob(state="running", pid=1, born=born_at(1), host="other", started=1.0)
    lines, left = cancelled(sweep, there)
    assert lines == []
    assert (left.state, left.host, left.started) == ("ended", "other", 1.0)
    with RunFolder(sweep / "one").claim():
        assert cancelled(sweep, there) == (["one runs on other: cancel it there"], there)
