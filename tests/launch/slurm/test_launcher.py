"""What the launcher of Slurm asks and tells it about single jobs."""

from dataclasses import replace

import pytest

from tests.launch.slurm.printed import submission
from titanlab.distributed import ALONE
from titanlab.launch import MemoryWord
from titanlab.launch.contract import ProcessPlace
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm import launcher as module
from titanlab.launch.slurm.launcher import MAX_ARRAY, SlurmLauncher

LAUNCHER = SlurmLauncher(Slurm())


# Of srun --ntasks=4, for one of its tasks.
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4",
}


def test_without_an_answer_an_array_has_the_size_that_every_site_takes(slurm):
    slurm["scontrol"] = "MaxArraySize = 10\n"
    assert LAUNCHER.max_array() == 10
    assert LAUNCHER.max_array(is_answered=False) == MAX_ARRAY
    assert slurm.asked == [("scontrol", "show", "config")]


@pytest.mark.parametrize(
    ("environ", "cores"),
    [
        ({}, None),
        ({"SLURM_CPUS_PER_TASK": "7"}, 7),
        # Each of 4 tasks may be bound to its own 2.
        (STEP | {"SLURM_CPUS_ON_NODE": "9"}, 2),
        (STEP | {"SLURM_CPUS_ON_NODE": "3"}, 1),
        (STEP, None),
        # A shell in an allocation.
        ({"SLURM_CPUS_ON_NODE": "9"}, None),
    ],
)
def test_cores_are_those_of_one_task(environ, cores):
    assert LAUNCHER.cores(environ) == cores


PLACE = ProcessPlace(
    launcher="slurm", job_id="12_0", raw_job_id="12", ranks=replace(ALONE, world=8), nodes=("n1", "n2", "n3", "n4")
)


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


EVENT = "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed."
SAID = EVENT.partition("error: ")[2]
LIMIT = "slurmstepd-n1: error: StepId=12.0 exceeded memory limit (1176580096 > 1073741824), being killed"


@pytest.mark.parametrize(
    ("logs", "word"),
    [
        ({0: f"{EVENT}\nsrun: error: n1: task 1: Out Of Memory\n"}, MemoryWord(SAID, 1)),
        # The others were ended because of it.
        (
            {0: f"{EVENT}\nsrun: error: n2: task 3: Out Of Memory\nsrun: error: n1: task 0: Killed\n"},
            MemoryWord(SAID, 3),
        ),
        ({0: "srun: error: n2: task 3: Killed\n", 3: f"noise\n{EVENT}\n"}, MemoryWord(SAID, 3)),
        ({0: f"slurmstepd-n1: error: Exceeded job memory limit\n{LIMIT}\n"}, MemoryWord(LIMIT[22:], None)),
        ({0: f"{LIMIT}\nsrun: error: n1: tasks 0-1: Killed\n"}, MemoryWord(LIMIT[22:], None)),
        (
            {0: f"{LIMIT}\nsrun: error: n1: tasks 0-1: Killed\nsrun: error: n2: task 2: Killed"},
            MemoryWord(LIMIT[22:], None),
        ),
        ({0: "srun: error: n1: task 1: Killed\n"}, None),
        ({0: "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-22T15:26:06 ***\n"}, None),
        ({}, None),
    ],
)
def test_sentence_and_rank(tmp_path, logs, word):
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for rank, text in logs.items():
        (jobs / f"12_3_{rank}_log.err").write_text(text)
    (jobs / "12_33_0_log.err").write_text(f"{EVENT}\nsrun: error: n1: task 9: Out Of Memory\n")
    found = LAUNCHER.memory_word(tmp_path, submission(), 3)
    assert found == (word and replace(word, said=f"Slurm says: {word.said}"))
