"""The record of a job on this host: what is written is read, a damaged file is none, and who is alive."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from titanlab.launch.local.queue import LocalJob, local_job, write_local_job
from titanlab.system.processes import born_at


def run_with(*, state=None, updated=0.0, claimed=False):
    """What a job asks of its run."""
    status = None if state is None else SimpleNamespace(state=state, updated=updated)
    return SimpleNamespace(known_status=lambda: status, is_claimed=lambda: claimed)


QUIET = run_with()


def test_what_is_written_is_read(tmp_path):
    job = LocalJob(state="running", pid=12, born=34, host="h", started=1.5, devices=("0", "GPU-1"), cause="no x")
    write_local_job(tmp_path, "token", 3, job)
    assert local_job(tmp_path, "token", 3) == job
    assert local_job(tmp_path, "token", 4) is None
    assert local_job(tmp_path, "other", 3) is None


def test_a_record_of_another_version_is_read_as_far_as_it_goes(tmp_path):
    write_local_job(tmp_path, "a", 0, LocalJob(state="starting"))
    path = tmp_path / "submissions" / "a" / "0.json"
    path.write_text(json.dumps({"schema": 1, "state": "ended", "color": "red"}))
    job = local_job(tmp_path, "a", 0)
    assert job is not None
    assert (job.state, job.pid, job.devices) == ("ended", None, ())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"state": null}',
        '{"state": "flying"}',
        '{"state": ["running"]}',
        '{"state": "running", "pid": "12"}',
        '{"state": "running", "pid": 1.5}',
        '{"state": "running", "born": true}',
        '{"state": "running", "started": "now"}',
        '{"state": "running", "devices": null}',
        '{"state": "running", "devices": "01"}',
        '{"state": "running", "devices": [0]}',
        '{"state": "running", "host": 7}',
        '{"state": "ended", "cause": 7}',
    ],
)
def test_a_damaged_record_is_none(tmp_path, content):
    """Then the job was not handled, as without a file; a claim of its run still keeps it from being started twice."""
    path = tmp_path / "submissions" / "a" / "0.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert local_job(tmp_path, "a", 0) is None


def test_a_controller_of_this_host_is_alive_by_its_number_and_its_birth():
    job = LocalJob(state="running", pid=os.getpid(), born=born_at(os.getpid()), started=1.0)
    assert job.is_here
    assert job.is_alive(QUIET)
    # Another process has got the number.
    assert not replace(job, born=1).is_alive(QUIET)
    assert not replace(job, pid=None, born=None).is_alive(QUIET)
    # Numbers that the system gives to no process.
    for pid in (0, -1, 2**31):
        assert not replace(job, pid=pid, born=None).is_alive(QUIET)


@pytest.mark.parametrize("state", ["starting", "ended", "cancelled"])
def test_only_a_running_job_is_alive(state):
    job = LocalJob(state=state, pid=os.getpid(), born=born_at(os.getpid()))
    assert not job.is_alive(run_with(claimed=True))


@pytest.mark.parametrize(
    ("started", "run", "alive"),
    [
        (1e9, QUIET, False),
        (None, QUIET, False),
        (1e9, run_with(claimed=True), True),
        (1e9, run_with(state="running", updated=-5.0), True),
        (1e9, run_with(state="running", updated=-500.0), False),
        # The status of an earlier attempt is no sign of life of this one.
        (1e9, run_with(state="ended", updated=-5.0), False),
        (1e9, run_with(state="prepared", updated=-5.0), False),
        # The ranks have not yet written a status.
        (-5.0, QUIET, True),
    ],
)
def test_a_job_of_another_host_is_judged_by_its_run(started, run, alive):
    """Times below 0 are seconds before now."""
    now = time.time()
    if (status := run.known_status()) is not None:
        status.updated = now + status.updated
    job = LocalJob(state="running", pid=os.getpid(), host="elsewhere", started=started)
    if started is not None and started < 0:
        job = replace(job, started=now + started)
    assert not job.is_here
    assert job.is_alive(run) is alive
