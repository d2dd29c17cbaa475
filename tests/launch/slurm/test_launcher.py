"""What the launcher of Slurm adds to the modules that it calls."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.slurm.printed import submission
from titanlab.launch import MemoryWord
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm.launcher import MAX_ARRAY, SlurmLauncher

LAUNCHER = SlurmLauncher(Slurm())
SWEEP = Path("sweep")


def test_jobs_of_several_submissions_are_cancelled_by_one_call(slurm):
    slurm["scancel"] = ""
    first = submission(runs=("one", "two", "three"))
    jobs = [(first, 2), (submission("bb"), 0), (first, 0)]
    LAUNCHER.cancel(SWEEP, jobs, print, is_gentle=False)
    # Both submissions have number 12.
    assert slurm.asked == [("scancel", "12_[0,2]")]


# Of srun --ntasks=4, for one of its tasks.
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4",
}


def test_a_job_has_the_number_of_its_array_and_its_index():
    assert LAUNCHER.job_number(submission(), 2) == "12_2"
    intended = Slurm().implementation().job_number(replace(submission(), job_id=None), 0)
    assert intended is None


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


def test_silence_is_what_sinfo_says(slurm):
    slurm["sinfo"] = "low\n"
    assert LAUNCHER.silence() is None
    slurm["sinfo"] = None
    assert LAUNCHER.silence() == "sinfo says: nothing"


def test_a_job_failed_early_for_what_its_tasks_have_printed(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "12_1_0_log.err").write_text(
        "ImportError: no x\nsrun: error: n1: task 0: Exited with code 1\n"
    )
    (tmp_path / "jobs" / "12_11_0_log.err").write_text("of another job\n")
    assert LAUNCHER.early_end(tmp_path, submission(), 1) == "ended before the run began: ImportError: no x"
    assert LAUNCHER.early_end(tmp_path, submission(), 0) is None


def test_the_word_about_memory_is_slurms(tmp_path):
    assert LAUNCHER.memory_word(tmp_path, submission(), 1) is None
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "12_1_0_log.err").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=13.0.\n")
    word = LAUNCHER.memory_word(tmp_path, submission(), 1)
    assert word == MemoryWord(said="Slurm says: Detected 1 oom_kill event in StepId=13.0.", rank=None)
