"""Jobs that end badly in every way there is: each with the right word, its own cause, and Slurm's agreement."""

import pytest

from tests.slurm.conftest import LIMITS, NEVER
from titanlab.records import OutcomeKind

pytestmark = pytest.mark.slurm

(STEPS,) = [point["training.steps"] for point in LIMITS if point["name"] == "requeued"]


@pytest.fixture(scope="module")
def ends(site, submitted):
    """Rows of the table by name, once all has ended."""
    for sweep in ("ends", "limits"):
        site.ended(sweep)
    return site.rows("ends") | site.rows("limits")


def state(site, sweep, name):
    """Slurm's word for the last start of a job, without who cancelled it, and its exit code."""
    last = site.starts(site.run(sweep, name))[-1]
    return last["State"].split()[0], last["ExitCode"]


def test_one_that_raises_is_its_own_rank_s_crash(site, ends):
    row = ends["raises"]
    assert (row["outcome"], row["rank"], row["step"]) == ("crash", 1, 2)
    assert row["cause"] == "LookupError: a planted fault"
    assert state(site, "ends", "raises") == ("FAILED", "1:0")
    said = site.titanlab("status", "ends", "raises")
    assert "in next_batch" in said.out
    assert "LookupError: a planted fault" in said.out
    # The other rank has noted that it only lost its peer, or was ended.
    (own,) = [note for note in site.run("ends", "raises").failures(1) if not note.echo]
    assert own.rank == 1


def test_one_whose_memory_is_limited_is_oom(site, ends):
    row = ends["memory"]
    assert (row["outcome"], row["rank"], row["step"]) == ("oom", 0, 2)
    assert "can't allocate memory" in row["cause"]
    assert state(site, "ends", "memory") == ("FAILED", f"{OutcomeKind.OOM.exit_code}:0")


def test_one_that_slurm_kills_for_its_memory_is_oom(site, ends):
    row = ends["over"]
    assert (row["outcome"], row["rank"], row["step"], row["exit_code"]) == ("oom", 0, 2, -9)
    assert "; Slurm says: StepId=" in row["cause"]
    assert "exceeded memory limit" in row["cause"]
    assert state(site, "ends", "over")[0] in ("FAILED", "OUT_OF_MEMORY")
    assert row["scheduler_state"] == state(site, "ends", "over")[0]


def test_one_that_is_killed_is_not_taken_for_want_of_memory(site, ends):
    row = ends["killed"]
    assert (row["outcome"], row["rank"], row["exit_code"]) == ("crash", 1, -9)
    assert "SIGKILL" in row["cause"]
    assert state(site, "ends", "killed") == ("FAILED", f"{OutcomeKind.CRASH.exit_code}:0")


def test_one_that_hangs_leaves_every_rank_s_stack(site, ends):
    row = ends["hangs"]
    assert (row["outcome"], row["step"]) == ("hang", 2)
    assert "step 3" in row["cause"]
    assert state(site, "ends", "hangs") == ("FAILED", f"{OutcomeKind.HANG.exit_code}:0")
    logs = site.run("ends", "hangs").logs
    stacks = [(logs / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert "next_batch" in stacks[1]
    assert all("in train" in stack for stack in stacks)


@pytest.mark.parametrize("name", [point["name"] for point in NEVER])
def test_one_that_is_cancelled_before_it_starts(site, submitted, name):
    site.ended("never")
    row = site.rows("never")[name]
    assert (row["outcome"], row["attempt"], row["scheduler_state"]) == ("cancelled", 0, "CANCELLED")
    assert row["cause"] == "the job was cancelled before it started"
    said = site.titanlab("retry", "never", name, "--outcome", "cancelled", "--dry-run")
    assert "1 run would be submitted" in said.out, said


def test_jobs_are_called_by_their_sweep_and_run(site, ends):
    names = {row["JobID"]: row["JobName"] for row in site.accounting("--allocations")}
    for name in ("hangs", "raises", "killed", "memory", "over"):
        run = site.run("ends", name)
        assert names[site.job_id(run)].startswith(f"ends/{run.path.name}-")


def test_one_that_is_cancelled(site, ends):
    row = ends["cancelled"]
    assert row["outcome"] == "cancelled"
    assert 3 <= row["step"] < 2000
    assert state(site, "limits", "cancelled")[0] == "CANCELLED"
    assert row["scheduler_state"].startswith("CANCELLED")


@pytest.mark.parametrize(("name", "attempts"), [("past_limit", [1]), ("late", [])])
def test_one_past_its_time_limit(site, ends, name, attempts):
    row = ends[name]
    assert (row["outcome"], row["scheduler_state"]) == ("walltime", "TIMEOUT")
    assert state(site, "limits", name)[0] == "TIMEOUT"
    assert site.run("limits", name).attempts() == attempts


def test_one_whose_time_is_over_goes_on_in_the_next(site, ends):
    row, run = ends["requeued"], site.run("limits", "requeued")
    assert (row["outcome"], row["step"]) == ("done", STEPS)
    assert row["attempt"] >= 2
    assert {run.result(attempt).kind for attempt in run.attempts()[:-1]} == {OutcomeKind.WALLTIME}
    assert state(site, "limits", "requeued") == ("COMPLETED", "0:0")
    # No step is lost, and none is done twice.
    lines = [line for line in (run.path / "metrics.jsonl").read_text().splitlines() if '"kind": "train"' in line]
    assert len(lines) == STEPS
    assert [row["step"] for row in run.metrics("train")] == list(range(1, STEPS + 1))
    # One run of wandb's, too.
    ids = {folder.name.rpartition("-")[2] for folder in run.path.glob("wandb/offline-run-*")}
    assert len(ids) == 1
