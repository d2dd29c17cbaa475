"""A node that fails: its runs go on elsewhere from their last checkpoints, or are said to have lost their machine."""

import pytest

from titanlab.records import OutcomeKind

pytestmark = pytest.mark.slurm

STEPS = 60


@pytest.fixture(scope="module")
def lost(site, submitted):
    """Two runs whose node went down under them, and came back later."""
    for sweep in submitted.words:
        site.ended(sweep)
    points = [{"name": "goes_on", "seed": 1}, {"name": "stays", "seed": 2, "launch.requeue": False}]
    long = [f"training.steps={STEPS}", "data.seconds=0.2", "checkpoint.every=5"]
    site.submit(site.sweep_command("lost", points, "launch.nodelist=n3", *long))
    for point in points:
        site.reached(site.run("lost", point["name"]), 12)
    site.slurm("scontrol", "update", "nodename=n3", "state=down", "reason=a test")
    site.bring_back("n3")
    site.ended("lost")
    return site.rows("lost")


def test_one_that_may_be_requeued_goes_on(site, lost):
    row, run = lost["goes_on"], site.run("lost", "goes_on")
    assert (row["outcome"], row["step"], row["attempt"]) == ("done", STEPS, 2)
    assert [row["step"] for row in run.metrics("train")] == list(range(1, STEPS + 1))


def test_one_that_may_not_has_lost_its_node(site, lost):
    assert (lost["stays"]["outcome"], lost["stays"]["scheduler_state"]) == ("node_fail", "NODE_FAIL")
    run = site.run("lost", "stays")
    assert run.result().kind is OutcomeKind.NODE_FAIL
    # It was alive in truth, and could save.
    assert run.result().step >= 12
