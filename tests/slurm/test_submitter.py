"""Who submits may be killed at any moment, and may edit the code afterwards."""

import contextlib
import random
import shutil
import subprocess
import time

import pytest

from tests.slurm.site import ROOT, Site
from titanlab.outcome import OutcomeKind

pytestmark = pytest.mark.slurm

KILLS = 8


def test_killed_at_random_moments_it_submits_all_and_nothing_twice(site, submitted):
    points = [
        {"name": f"run{number}", "seed": number, **({"parallelism": "ddp", "world": 2} if number > 2 else {})}
        for number in range(1, 5)
    ]
    command = site.sweep_command("killed", points, "training.steps=2")
    rng, seconds = random.Random(0), 4.0
    for kill in range(KILLS):
        intents, begin = _intents(site), time.monotonic()
        process = subprocess.Popen(
            site.command(*command),
            cwd=site.folder,
            env=site.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if kill % 2:
            # Where it matters most: from just before the first call of sbatch until after the second.
            while process.poll() is None and _intents(site) == intents:
                time.sleep(0.005)
            time.sleep(rng.uniform(0.0, 0.6))
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=rng.uniform(0.2, 1.0) * seconds)
        if process.poll() is None:
            # sbatch, if it has been called, stays: the process alone is killed.
            process.kill()
            process.wait()
        else:
            # It was done before.
            seconds = time.monotonic() - begin
    last = site.titanlab(*command)
    assert last.code == 0, last.err
    folder = site.ended("killed")
    assert sorted(run for each in folder.submissions() for run in each.runs) == [run.path.name for run in folder.runs()]
    assert [run.name for run in folder.runs()] == ["run1", "run2", "run3", "run4"]
    for run in folder.runs():
        assert (run.result().kind, run.attempts()) == (OutcomeKind.DONE, [1])
    # No job that nobody knows of is in the accounting.
    known = {
        each.job_name for sweep in (site.folder / "runs").iterdir() for each in site.sweep(sweep.name).submissions()
    }
    names = [row["JobName"] for row in site.accounting("--allocations") if row["JobName"].startswith("titanlab-")]
    assert set(names) <= known
    mine = {each.job_name for each in folder.submissions()}
    assert len([name for name in names if name in mine]) == len(points)
    # Once more, with all done.
    assert site.titanlab(*command).code == 0
    assert site.sweep("killed").submissions() == folder.submissions()


def _intents(site):
    return sorted((site.folder / "runs" / "killed" / "submissions").glob("*.json"))


def test_code_that_is_edited_after_submission_reaches_no_job(slurm_conf, tmp_path):
    clone = tmp_path / "clone"
    for name in ("titanlab", "conf", "launch", "sweeps"):
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    site = Site(tmp_path / "here", slurm_conf, code=clone)
    command = site.sweep_command("edited", [{"name": "before", "seed": 11}], "launch.extra={hold: true}")
    said = site.titanlab(*command)
    assert said.code == 0, said.err
    (clone / "titanlab" / "train.py").write_text("raise RuntimeError('edited')\n")
    (clone / "titanlab" / "worker.py").write_text("raise RuntimeError('edited')\n")
    (job,) = [each.job_id for each in site.sweep("edited").submissions()]
    site.slurm("scontrol", "release", job)
    site.ended("edited")
    run = site.run("edited", "before")
    assert (run.result().kind, run.attempts()) == (OutcomeKind.DONE, [1])
    # And what is submitted now does run what was edited.
    said = site.titanlab(*site.sweep_command("edited", [{"name": "after", "seed": 12}]))
    assert said.code == 0, said.err
    site.ended("edited")
    assert site.run("edited", "after").result().kind is OutcomeKind.CRASH
