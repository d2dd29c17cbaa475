"""A node dies under a job with `launch.min_world`: the run goes on with fewer processes, and its result is right."""

import json

import pytest

from tests.slurm.site import losses
from titanlab.records import OutcomeKind

pytestmark = pytest.mark.slurm

STEPS = 40
# Two nodes of two processes each.
POINT = {"parallelism": "ddp", "world": 4, "training.steps": STEPS, "checkpoint.every": 5}
SMALLER = ["launch.restarts=2", "launch.min_world=2"]


@pytest.fixture(scope="module")
def calm(site):
    """Losses of the same run, which nothing disturbs."""
    site.submit(site.sweep_command("lost_calm", [{"name": "calm", "seed": 40, **POINT}]))
    site.ended("lost_calm")
    return losses(site.run("lost_calm", "calm"))


def check(run, calm):
    assert (run.result().kind, run.result().step, run.attempts()) == (OutcomeKind.DONE, STEPS, [1, 2])
    assert [run.config(attempt)["world"] for attempt in (1, 2)] == [4, 2]
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))
    assert [loss for _, loss in losses(run)] == pytest.approx([loss for _, loss in calm], rel=1e-5)


def test_a_job_goes_on_without_a_node_that_is_lost(site, calm):
    point = {"name": "second", "seed": 40, **POINT, "data.seconds": 0.3, "launch.nodelist": "n[1-2]"}
    site.submit(site.sweep_command("lost_second", [point], *SMALLER))
    run = site.run("lost_second", "second")
    site.reached(run, 7)
    site.fail("n2")
    try:
        site.ended("lost_second")
    finally:
        site.boot("n2")
    check(run, calm)
    assert run.result(1).kind is OutcomeKind.NODE_FAIL
    why = json.loads((run.attempt_folder(2) / "restart.json").read_text())["why"]
    assert "ranks 2, 3 on n2 are lost: slurm has taken node n2 from the job, and left out: dp_r4 becomes dp_r2" in why
    # One job, which started once: the accounting begins a new row for its new size.
    assert [row["State"] for row in site.starts(run)] == ["RESIZING", "COMPLETED"]
    assert run.job(2)["restart_count"] == 0


def test_a_job_that_loses_its_first_node_starts_again_on_fewer(site, calm):
    # The other nodes stay busy, so there is only one for it. Slurm waits two minutes before it starts the job again.
    hold = ["--partition=high", "--nodelist=n[3-4]", "--nodes=2", "--exclusive", "--time=20", "--output=/dev/null"]
    busy = site.slurm("sbatch", "--parsable", *hold, "--wrap=sleep 1200").strip()
    point = {"name": "first", "seed": 40, **POINT, "data.seconds": 0.3}
    try:
        site.submit(site.sweep_command("lost_first", [point], *SMALLER))
        run = site.run("lost_first", "first")
        site.reached(run, 7)
        site.fail("n1")
        try:
            site.ended("lost_first", seconds=450)
        finally:
            site.boot("n1")
    finally:
        site.slurm("scancel", busy)
    check(run, calm)
    assert run.job(2)["restart_count"] == 1
    assert run.job(2)["nodes"] == ["n2"]
