"""A job of four ranks is stopped, goes on as a job of two, and ends with the losses of an undisturbed run."""

import pytest

from tests.slurm.site import losses
from titanlab.records.outcome import OutcomeKind

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
