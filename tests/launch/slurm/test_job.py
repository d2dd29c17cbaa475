"""A job that has lost a node: what Slurm is asked, and what it is told."""

from dataclasses import replace

import pytest

from titanlab.distributed import ALONE
from titanlab.launch.contract import ProcessPlace
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm import launcher as module
from titanlab.launch.slurm.launcher import SlurmLauncher

PLACE = ProcessPlace(
    launcher="slurm", job_id="12_0", raw_job_id="12", ranks=replace(ALONE, world=8), nodes=("n1", "n2", "n3", "n4")
)

LAUNCHER = SlurmLauncher(Slurm())


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Writes a scontrol that is first on PATH; returns what it was called with."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(facts, update="exit 0"):
        path = tmp_path / "scontrol"
        case = f'case "$1" in show) echo "{facts}";; update) {update};; esac'
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{case}\n')
        path.chmod(0o755)
        return lambda: (tmp_path / "calls").read_text().splitlines()

    return write


@pytest.mark.parametrize(
    ("nodes", "lost"),
    [
        ("n[1-4]", set()),
        ("n[1,3-4]", {"n2"}),
        ("n4", {"n1", "n2", "n3"}),
        # It waits in the queue again.
        ("", set()),
        ("(null)", set()),
    ],
)
def test_nodes_that_slurm_has_taken(scontrol, nodes, lost):
    scontrol(f"JobId=12 JobState=RUNNING ReqNodeList=(null) NodeList={nodes} BatchHost=n1")
    assert LAUNCHER.lost_nodes(PLACE) == lost


def test_no_answer_is_no_loss(scontrol, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    scontrol("slurm_load_jobs error: Unable to contact slurm controller")
    assert LAUNCHER.lost_nodes(PLACE) == frozenset()


def test_a_request_for_fewer_nodes(scontrol, monkeypatch):
    calls = scontrol("JobId=12 JobState=RUNNING Restarts=0 CPUs/Task=3")
    assert LAUNCHER.requeue_on_fewer(PLACE, least=2, most=4) is None
    assert calls()[-2:] == ["requeue 12_0", "update JobId=12_0 NumNodes=2-4 NumTasks=4 NumCPUs=12"]


def test_a_request_that_is_refused_or_interrupted(scontrol, monkeypatch, tmp_path):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    # Slurm ends the processes of the job, scontrol among them.
    calls = scontrol(
        "JobState=RUNNING Restarts=0", update=f"test -e {tmp_path}/once || {{ touch {tmp_path}/once; kill $$; }}"
    )
    assert LAUNCHER.requeue_on_fewer(PLACE, least=2, most=4) is None
    assert sum(call.startswith("update") for call in calls()) == 2
    scontrol("JobState=RUNNING Restarts=0", update="echo 'Requested node configuration is not available' >&2; exit 1")
    assert (
        LAUNCHER.requeue_on_fewer(PLACE, least=2, most=4)
        == "it waits for 4; Requested node configuration is not available"
    )
    scontrol("JobState=COMPLETING Restarts=1")
    assert LAUNCHER.requeue_on_fewer(PLACE, least=2, most=4) == "Slurm has done that already"
