"""A submitter is killed at random moments, and the next one finishes its work: nothing twice, nothing missing."""

import collections
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.until import until
from titanlab.sweep import SweepFolder

ROOT = Path(__file__).parents[2]
ROUNDS = 20


def killed(folder, launcher, rounds):
    command = [sys.executable, "-m", "tests.sweep.killed", str(folder), launcher, str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(each["killed"] for each in found["rounds"]) == rounds
    assert {each["again"] for each in found["rounds"]} == {0}
    return found


def submitted_once(folder, count):
    runs = collections.Counter(run for each in folder.submissions() for run in each.runs)
    assert len(runs) == count
    assert set(runs.values()) == {1}
    assert all(each.state == "submitted" for each in folder.submissions())
    assert sorted(runs) == [run.path.name for run in folder.runs()]


@pytest.mark.full
@pytest.mark.parametrize("rounds", [ROUNDS])
def test_slurm_has_every_job_once(tmp_path, rounds):
    found = killed(tmp_path, "slurm", rounds)
    # One that was left behind would have come by now.
    time.sleep(1.0)
    jobs = [json.loads(path.read_text()) for path in (tmp_path / "slurm" / "jobs").glob("*.json")]
    arrays = {job["flags"]["job-name"]: len(job["states"]) for job in jobs}
    assert len(arrays) == len(jobs)
    known = {}
    for each in found["rounds"]:
        folder = SweepFolder(Path(each["folder"]))
        submitted_once(folder, found["runs"])
        known.update({submission.job_name(folder.name): len(submission.runs) for submission in folder.submissions()})
    whole = SweepFolder(tmp_path / "whole" / "layouts")
    known.update({submission.job_name(whole.name): len(submission.runs) for submission in whole.submissions()})
    assert arrays == known


@pytest.mark.full
def test_what_is_done_anew_is_put_aside_and_has_a_new_job_or_stays_as_it_is(tmp_path):
    found = killed(tmp_path, "force", ROUNDS)
    for each in found["rounds"]:
        folder = SweepFolder(Path(each["folder"]))
        submitted = collections.Counter(run for job in folder.submissions() for run in job.runs)
        assert len(folder.runs()) == len(submitted) == found["runs"]
        for run in folder.runs():
            aside = folder.superseded / f"{run.path.name}.1"
            if aside.exists():
                # Its earlier end is kept, nobody invents one, and there is one job for it.
                assert (aside / "result.json").is_file()
                assert (run.result(), submitted[run.path.name]) == (None, 2)
            else:
                assert (run.result().kind, submitted[run.path.name]) == ("done", 1)
        assert not list(folder.superseded.glob("*.2"))
        assert all(job.state == "submitted" for job in folder.submissions())


# With `nohup`, a launcher of another package, each submission has a process of its own: fewer rounds.
@pytest.mark.full
@pytest.mark.parametrize(("launcher", "rounds"), [("local", ROUNDS), ("nohup", 4)])
def test_this_host_runs_every_job_once(tmp_path, launcher, rounds):
    found = killed(tmp_path, launcher, rounds)
    for each in found["rounds"]:
        folder = SweepFolder(Path(each["folder"]))
        submitted_once(folder, found["runs"])
        until(lambda folder=folder: all(run.result() for run in folder.runs()), 120)
        ran = [line.split()[:2] for line in (folder.path / "ran.txt").read_text().splitlines()]
        starts = collections.Counter(run for run, rank in ran if rank == "0")
        assert len(starts) == found["runs"]
        assert set(starts.values()) == {1}
        assert all(run.result().kind == "done" for run in folder.runs())
