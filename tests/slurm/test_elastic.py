"""A job of four ranks is stopped, goes on as a job of two, and ends with the losses of an undisturbed run."""

import json

import pytest

from tests.slurm.site import losses
from titanlab.records import OutcomeKind

pytestmark = pytest.mark.slurm

STEPS = 60
POINT = {"name": "four", "seed": 30, "parallelism": "fsdp", "world": 4, "training.steps": STEPS}


def test_a_stopped_job_goes_on_at_another_layout_through_slurm(site):
    site.submit(site.sweep_command("elastic", [POINT], "data.seconds=0.2"))
    site.submit(site.sweep_command("elastic_calm", [POINT]))
    run = site.run("elastic", "four")
    site.reached(run, 5)
    site.submit(["cancel", "elastic"])
    site.ended("elastic")
    stopped = run.result()
    assert (stopped.kind, run.attempts()) == (OutcomeKind.CANCELLED, [1])
    # No word of Slurm: the run was submitted, so it goes on there.
    said = site.submit(["resume", str(run.path), "parallelism=fsdp_tp", "world=2"])
    assert "1 run of 2 processes" in said.out
    site.ended("elastic")
    assert (run.result().kind, run.attempts()) == (OutcomeKind.DONE, [1, 2])
    assert [run.config(attempt)["world"] for attempt in (1, 2)] == [4, 2]
    assert run.config(2)["parallelism"]["tensor"] == 2
    assert run.job(2)["launcher"] == "slurm"
    assert [row["step"] for row in run.metrics("attempt")] == [0, stopped.step]
    site.ended("elastic_calm")
    calm = site.run("elastic_calm", "four")
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))
    assert [loss for _, loss in losses(run)] == pytest.approx([loss for _, loss in losses(calm)], rel=1e-5)


def test_a_rank_that_is_killed_in_a_job_comes_back_in_place(site):
    point = {"name": "killed", "seed": 31, "parallelism": "ddp", "world": 2, "checkpoint.every": 2}
    fault = {"data.fault": "kill", "data.step": 5, "data.rank": 1, "data.attempt": 1}
    site.submit(site.sweep_command("restarts", [{**point, **fault}], "launch.restarts=2"))
    site.ended("restarts")
    run = site.run("restarts", "killed")
    assert (run.result().kind, run.attempts()) == (OutcomeKind.DONE, [1, 2])
    assert run.result(1).kind is OutcomeKind.CRASH
    assert [row["step"] for row in run.metrics("attempt")] == [0, 4]
    # One job, which started once.
    assert [row["State"] for row in site.starts(run)] == ["COMPLETED"]
    assert json.loads((run.attempt_folder(2) / "restart.json").read_text())["number"] == 1
