"""Who submits may be killed at any moment, and may edit the code afterwards."""

import contextlib
import random
import shutil
import subprocess
import time

import pytest

from tests.slurm.site import ROOT, Site
from titanlab.launch.submission import token_of
from titanlab.records import OutcomeKind

pytestmark = pytest.mark.slurm

KILLS = 20


def test_killed_at_twenty_random_moments_it_submits_all_and_nothing_twice(site, submitted):
    """Sweeps of two shapes, whose submitter is killed twice, or is done before, and then left alone."""
    # A process each, so that many do not take long; the time that they ask for makes the shapes two.
    points = [{"name": "short", "seed": 1, "launch.minutes": 4}, {"name": "long", "seed": 2, "launch.minutes": 5}]
    commands: dict[str, list[str]] = {}
    rng, seconds, kills = random.Random(0), 3.0, 0
    while kills < KILLS:
        # Not more than half of them are late.
        assert len(commands) < KILLS
        name = f"killed{len(commands)}"
        command = commands[name] = site.sweep_command(name, points)
        for around_sbatch in (True, False) if rng.random() < 0.5 else (False, True):
            intents, begin = _intents(site, name), time.monotonic()
            process = _started(site, command)
            if around_sbatch:
                # Where it matters most: from just before the first call of sbatch until after the second.
                while process.poll() is None and _intents(site, name) == intents:
                    time.sleep(0.005)
                time.sleep(rng.uniform(0.0, 0.25))
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=rng.uniform(0.1, 0.8) * seconds)
            if process.poll() is None:
                # sbatch, if it has been called, stays: the process alone is killed.
                process.kill()
                process.wait()
                kills += 1
            else:
                # It was done before.
                seconds = time.monotonic() - begin
        last = site.titanlab(*command)
        assert last.code == 0, last.err
    folders = [site.ended(name) for name in commands]
    names = [row["JobName"] for row in site.accounting("--allocations") if row["JobName"].startswith("killed")]
    tokens = [token_of(name) for name in names]
    for folder, command in zip(folders, commands.values(), strict=True):
        assert [run.name for run in folder.runs()] == ["long", "short"]
        submissions = folder.submissions()
        assert sorted(run for each in submissions for run in each.runs) == [run.path.name for run in folder.runs()]
        for run in folder.runs():
            assert (run.result().kind, run.attempts()) == (OutcomeKind.DONE, [1])
        mine = {each.token for each in submissions}
        assert len([token for token in tokens if token in mine]) == len(points)
        assert {each.job_name(folder.name) for each in submissions} <= set(names)
        # Once more, with all done.
        assert site.titanlab(*command).code == 0
        assert folder.submissions() == submissions
    # No job that nobody knows of is in the accounting.
    known = {each.token for name in commands for each in site.sweep(name).submissions()}
    assert set(tokens) <= known


def test_what_no_node_can_run_is_refused_and_leaves_nothing(site):
    """Slurm lists such jobs as failed for some minutes; the next look is not to take them for a submission."""
    command = site.sweep_command("refused", [{"name": "large", "seed": 1}], "launch.memory_gib=900")
    for _ in range(2):
        said = site.titanlab(*command)
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert "sbatch says: Memory specification can not be satisfied" in said.err
        assert site.sweep("refused").submissions() == []


def _started(site, command):
    return subprocess.Popen(
        site.command(*command),
        cwd=site.folder,
        env=site.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _intents(site, sweep):
    return sorted((site.folder / "runs" / sweep / "submissions").glob("*.json"))


def test_code_that_is_edited_after_submission_reaches_no_job(slurm_conf, tmp_path):
    clone = tmp_path / "clone"
    for name in ("titanlab", "conf", "launch", "sweeps"):
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    site = Site(tmp_path / "here", slurm_conf, code=clone)
    command = site.sweep_command("edited", [{"name": "before", "seed": 11}], "launch.extra={hold: true}")
    said = site.titanlab(*command)
    assert said.code == 0, said.err
    (clone / "titanlab" / "train" / "train.py").write_text("raise RuntimeError('edited')\n")
    (clone / "titanlab" / "launch" / "rank" / "rank.py").write_text("raise RuntimeError('edited')\n")
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
