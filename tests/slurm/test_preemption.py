"""A run that gives way to a job of a higher partition, goes back into the queue and goes on, as if nothing had been."""

import pytest

from tests.slurm.conftest import VICTIM
from tests.slurm.site import losses
from titanlab.records import OutcomeKind

pytestmark = pytest.mark.slurm

STEPS = VICTIM["training.steps"]


@pytest.fixture(scope="module")
def victim(site, submitted):
    site.ended("preempted")
    jobs = site.accounting(f"--jobs={submitted.higher}", "--allocations")
    assert [row["State"] for row in jobs] == ["COMPLETED"]
    return site.run("preempted", "victim")


def test_it_is_preempted_requeued_and_done(site, victim):
    assert victim.result().kind is OutcomeKind.DONE
    assert victim.attempts() == [1, 2]
    assert victim.result(1).kind is OutcomeKind.PREEMPTED
    assert 5 <= victim.result(1).step < STEPS
    rows = site.starts(victim)
    assert len(rows) == 2
    assert rows[0]["State"] in ("REQUEUED", "PREEMPTED")
    assert rows[1]["State"] == "COMPLETED"
    row = site.rows("preempted")["victim"]
    assert (row["outcome"], row["previous_outcome"], row["attempt"], row["step"]) == ("done", "preempted", 2, STEPS)


def test_its_losses_are_an_undisturbed_run_s_bit_for_bit(site, victim):
    site.ended("calm")
    calm = site.run("calm", "victim")
    assert calm.attempts() == [1]
    assert victim.identity() == calm.identity()
    assert [step for step, _ in losses(victim)] == list(range(1, STEPS + 1))
    assert losses(victim) == losses(calm)
    # Nor was a step done twice.
    train = [line for line in (victim.path / "metrics.jsonl").read_text().splitlines() if '"kind": "train"' in line]
    assert len(train) == STEPS
