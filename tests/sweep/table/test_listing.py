"""A sweep in words: cells, counts, causes, plain lines."""

import pytest

from tests.sweep.made import begin, end, train, word
from titanlab.sweep import SweepTable, aligned, dropped, state_counts
from titanlab.sweep.listing import cells, failures, text


@pytest.fixture
def mixed(made):
    """One run of each kind, and points that were dropped."""
    done = made.run("single")
    begin(done)
    end(done)
    crowded = made.run("fsdp_tp", shard=2, tensor=2)
    begin(crowded, cores=2)
    train(crowded, step=6, updated=1000.0)
    failed = made.run("fsdp", shard=2)
    begin(failed)
    end(failed, "oom", rank=1, cause="CUDA out of memory")
    waiting = made.run("ddp", replicate=2)
    begin(waiting)
    end(waiting, "preempted")
    submitted = made.submit(waiting)
    for value in ("3", "5", "7"):
        made.drop("rule", "parallelism.tensor: must divide 4 heads", parallelism=value)
    made.drop("where", "world <= 8", parallelism="16")
    return SweepTable(made.folder).rows({(submitted.token, 0): word("requeued", "PENDING", "BeginTime")})


def test_plain_lines(mixed):
    lines = text("layouts", mixed, now=1400.0).splitlines()
    hashes = [row["run"] for row in mixed if row["run"]]
    assert [line.rstrip() for line in lines] == [
        "layouts",
        "  run               layout     state     step   tok/s    MFU   GiB  left",
        f"  {hashes[0]}   single     done     10/10  1,000   41.5%  0.75",
        f"  {hashes[1]}  dp_s2·tp2  running   6/10    900*               1:15  silent for 6:40",
        f"  {hashes[2]}     dp_s2      oom       4/10",
        f"  {hashes[3]}      dp_r2      queued    4/10                             BeginTime, attempt 1, after preempted",
        "* oversubscribed: more processes than cores, so that the speed says nothing",
        "4 runs: 1 done, 1 oom, 1 running, 1 queued",
        f"  {hashes[2]}: oom, rank 1, step 4: CUDA out of memory",
        "4 points dropped: 3 by rule, 1 by where",
        "  3 × parallelism.tensor: must divide 4 heads",
        "  1 × world <= 8",
    ]


def test_a_run_that_was_heard_of_just_now_is_not_silent(mixed):
    (running,) = [row for row in mixed if row["state"] == "running"]
    assert cells(running, now=1299.0)[-1] == ""
    assert cells(running, now=1301.0)[-1] == "silent for 5:01"


def test_every_failure_has_one_line(made):
    for place, (kind, given) in enumerate(
        [("crash", {"cause": "boom"}), ("cancelled", {"step": 0}), ("done", {}), ("nan", {"rank": 0, "cause": "nan"})]
    ):
        run = made.run(f"r{place}", seed=place)
        begin(run)
        end(run, kind, **given)
    gone = made.run("gone", seed=9)
    (gone.path / "config.yaml").unlink()
    rows = SweepTable(made.folder).rows()
    told = [line.partition(": ")[2] for line in failures(rows)]
    assert told == [
        "crash, step 4: boom",
        "cancelled",
        "nan, rank 0, step 4: nan",
        "missing: its folder is gone; submit the sweep again",
    ]
    assert state_counts(rows) == "5 runs: 1 done, 1 nan, 1 crash, 1 cancelled, 1 missing"


@pytest.mark.parametrize(
    ("kind", "word", "told"),
    [
        ("done", "COMPLETED", []),
        ("done", "RUNNING", []),
        ("done", "FAILED", ["done; the scheduler says FAILED"]),
        ("crash", "FAILED", ["crash, step 4: boom"]),
        ("crash", "COMPLETED", ["crash, step 4: boom; the scheduler says COMPLETED"]),
    ],
)
def test_a_scheduler_that_says_the_contrary_is_heard(made, kind, word, told):
    run = made.run("r", seed=0)
    begin(run)
    end(run, kind, cause=None if kind == "done" else "boom")
    rows = [{**row, "scheduler_state": word} for row in SweepTable(made.folder).rows()]
    assert [line.partition(": ")[2] for line in failures(rows)] == told


def test_many_reasons_are_cut(made):
    for place in range(8):
        made.drop("rule", f"reason {place}", key=place)
    lines = dropped(SweepTable(made.folder).rows())
    assert lines[0] == "8 points dropped: 8 by rule"
    assert len(lines) == 1 + 5 + 1
    assert lines[-1] == "  … and 3 more reasons, which `titanlab collect` lists"


def test_columns_without_a_word_are_left_out():
    lines = aligned(("a", "figure", "b"), [("x", "1", ""), ("yy", "10", "")], right=("figure",))
    assert lines == ["a   figure", "x        1", "yy      10"]
