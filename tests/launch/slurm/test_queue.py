"""What Slurm's queue is asked and told: partitions, sizes of arrays, the jobs of a token, and cancellation."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.slurm.printed import submission
from titanlab.errors import ConfigError
from titanlab.launch import JobShape
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm import site
from titanlab.launch.slurm.command import Reply
from titanlab.launch.slurm.launcher import SlurmLauncher

COMMANDS = ("sbatch", "srun", "squeue", "sinfo")
LAUNCHER, SWEEP = SlurmLauncher(Slurm()), Path("sweep")


def cancel(elements, *, is_gentle):
    """Cancel elements of arrays, by number."""
    jobs = [(replace(submission(), job_id=number), index) for number, own in elements.items() for index in own]
    LAUNCHER.cancel(SWEEP, jobs, print, is_gentle=is_gentle)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs empty programs, and nothing else is on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(*names):
        for name in names:
            (tmp_path / name).write_text("")
            (tmp_path / name).chmod(0o755)

    return install


def refusal(problem="no answer", errors=""):
    return Reply(output=None, errors=errors, problem=problem)


# Whether jobs can be submitted


@pytest.mark.parametrize(
    ("listed", "partition", "nodes", "told"),
    [
        ("small 2\nlarge* 8\n", None, 8, None),
        ("small 2\nlarge* 8\n", None, 9, "world=36: needs 9 nodes, and the default partition has 8; try world=32"),
        ("small 2\nlarge* 8\n", "large", 8, None),
        ("small 2\nlarge* 8\n", "small", 3, "world=12: needs 3 nodes, and partition small has 2; try world=8"),
        # Slurm takes the first of several partitions that fits.
        ("small 2\nlarge* 8\n", "small,large", 8, None),
        ("small 2\nlarge* 8\n", "small,large", 9, "partition large has 8"),
        ("small 2\nlarge* 8\n", "small,fast", 1, "launch.partition=small,fast: Slurm knows no such partition"),
        ("small 2\nlarge* 8\n", "fast", 1, "known: large, small"),
        # One line for each group of equal nodes.
        ("mixed 2\nmixed 3\n", "mixed", 5, None),
        ("mixed* 2\nmixed* 3\n", None, 6, "the default partition has 5"),
        # A site without a default partition: sbatch says what it thinks of it.
        ("small 2\n", None, 99, None),
        ("PARTITION NODES\nsmall 2\n\nsmall\n", "small", 2, None),
    ],
)
def test_a_job_needs_a_partition_that_is_there_and_large_enough(installed, slurm, listed, partition, nodes, told):
    installed(*COMMANDS)
    slurm["sinfo"] = listed
    jobs = [(Slurm(partition=partition), JobShape(processes=4 * nodes, nodes=nodes, tasks_per_node=4))]
    if told is None:
        site.check(jobs)
    else:
        with pytest.raises(ConfigError, match=re.escape(told)):
            site.check(jobs)
    # Also partitions that are hidden from this user's own listings.
    assert slurm.asked == [("sinfo", "--noheader", "--all", "--format=%P %D %a %l %c %G")]


LISTED = "small* 2 up 1:00:00 8\nlarge 8 up 2-00:00:00 64\nlarge 1 up 2-00:00:00 8+\noff 9 down infinite 64\n"


@pytest.mark.parametrize(
    ("given", "cores", "told"),
    [
        ({"minutes": 60}, 8, None),
        ({"minutes": 61}, 8, "launch.minutes=61: is more than the default partition allows, 60; try 60, or another"),
        ({"minutes": 600, "partition": "large"}, 8, None),
        (
            {"minutes": 2881, "partition": "small,large"},
            8,
            "launch.minutes=2881: is more than partition large allows, 2880",
        ),
        # A quality of service may allow more.
        ({"minutes": 600, "qos": "long"}, 8, None),
        (
            {"partition": "off"},
            8,
            "launch.partition=off: partition off is down; choose another launch.partition, or wait",
        ),
        ({"partition": "off,small"}, 8, None),
        (
            {},
            9,
            "launch.cpus_per_task=9: needs 9 cores of a node with 1 process, and the default partition has nodes of 8",
        ),
        # Some nodes have 8 cores or more, nobody knows how many.
        ({"partition": "large"}, 65, None),
    ],
)
def test_a_job_that_would_wait_for_ever_is_refused(installed, slurm, given, cores, told):
    installed(*COMMANDS)
    slurm["sinfo"] = LISTED
    config = Slurm(cpus_per_task=cores, **given)
    jobs = [(config, JobShape(processes=1, tasks_per_node=1, cpus_per_task=cores, minutes=config.minutes))]
    if told is None:
        site.check(jobs)
    else:
        with pytest.raises(ConfigError, match=re.escape(told)):
            site.check(jobs)


@pytest.mark.parametrize(
    ("settings", "jobs"),
    [
        (None, 1000),
        ("", 1000),
        ("MaxArraySize            = 1001\n", 1000),
        ("MaxArraySize            = 200\n", 200),
        ("MaxArraySize            = 4000001\n", 1000),
        # Arrays are off; sbatch says so.
        ("MaxArraySize            = 0\n", 1),
        ("MaxArraySize = 1001\nSchedulerParameters = bf_interval=2,max_array_tasks=50\n", 50),
        ("MaxArraySize = 30\nSchedulerParameters = max_array_tasks=50\n", 30),
    ],
)
def test_an_array_has_at_most_as_many_jobs_as_the_site_allows(slurm, settings, jobs):
    slurm["scontrol"] = settings
    assert LAUNCHER.max_array() == jobs


# The jobs of a token


@pytest.mark.parametrize(
    ("squeue", "sacct", "number"),
    [
        ("", "", None),
        ("sweep-aa|12|PENDING|None\n", None, "12"),
        ("sweep-bb|11|PENDING|None\nsweep/one-aa|12|RUNNING|None\n", None, "12"),
        ("aa-sweep|12|PENDING|None\n", "", None),
        # What sbatch has refused was never a job, and another one that failed was.
        ("sweep-aa|12|FAILED|BadConstraints\n", "", None),
        ("sweep-aa|12|FAILED|BadConstraints\nsweep-aa|13|PENDING|None\n", "", "13"),
        ("sweep-aa|12|FAILED|NonZeroExitCode\n", "", "12"),
        # The queue has forgotten them.
        ("", "sweep-bb|11\nsweep/one-aa|12_0\nsweep/two-aa|12_1\n", "12"),
        ("", "sweep-aa|12_[0-3]\n", "12"),
        ("", "an error\nsweep-aa|12|more\n\n", None),
    ],
)
def test_jobs_are_found_by_their_token(slurm, squeue, sacct, number):
    slurm.update(squeue=squeue, sacct=sacct)
    assert LAUNCHER.find(SWEEP, submission()) == number


def test_a_site_without_accounting_has_no_older_jobs(slurm):
    slurm["sacct"] = Reply(output=None, problem="there is no sacct on PATH", is_here=False)
    assert LAUNCHER.find(SWEEP, submission()) is None
    slurm["sacct"] = refusal(errors="Slurm accounting storage is disabled\n")
    assert LAUNCHER.find(SWEEP, submission()) is None


# Cancellation


def test_elements_of_all_arrays_are_cancelled_by_one_call(slurm):
    slurm["scancel"] = ""
    cancel({"12": [2, 0, 1], "15": {4}}, is_gentle=False)
    cancel({"12": [7, 5]}, is_gentle=True)
    assert slurm.asked == [("scancel", "12_[0-2]", "15_[4]"), ("scancel", "--signal=INT", "12_[5,7]")]
    # The length of a command line is limited.
    slurm.asked.clear()
    cancel({str(number): [0] for number in range(1001)}, is_gentle=True)
    assert [len(words) for words in slurm.asked] == [502, 502, 3]


@pytest.mark.parametrize(
    "errors",
    [
        "scancel: error: Kill job error on job id 12_0: Invalid job id specified",
        "scancel: error: Job/step already completing or completed",
        "Access/permission denied\nJob can not be altered now, try again later",
    ],
)
def test_jobs_that_have_ended_already_are_no_error_of_cancelling(slurm, errors):
    slurm["scancel"] = refusal(errors=errors)
    cancel({"12": [0]}, is_gentle=False)
    assert [command[0] for command in slurm.asked] == ["scancel"]
