"""Rows in words: a sweep, its recipes compared, one run, and all sweeps of a folder."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from tests.sweep.made import Made, begin, end, train, word
from tests.sweep.table.plain import row
from titanlab.records import Outcome, OutcomeKind
from titanlab.sweep import RecipeRuns, SweepTable, dropped, failure_text, groups, overview, row_details, state_counts
from titanlab.sweep.listing import comparison, failures, text


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


def test_recipes_are_compared_by_layout_and_what_else_differs(made):
    for name, given in [("fsdp", {"shard": 2}), ("fsdp_tp", {"shard": 2, "tensor": 2})]:
        for bf16 in (False, True):
            run = made.run(f"{name}-{bf16}", bf16=bf16, point={"parallelism": name, "precision": bf16}, **given)
            begin(run)
            end(run)
    lines = comparison(SweepTable(made.folder).rows())
    # The microbatch follows from the layout: nobody has chosen it.
    assert lines == [
        "layout     processes  precision  tokens/s  of all    MFU   GiB    loss  outcome",
        "dp_s2              2  fp32         1,000   2,000   41.5%  0.75  4.2500  done",
        "dp_s2              2  bf16         1,000   2,000   41.5%  0.75  4.2500  done",
        "dp_s2·tp2          4  fp32         1,000*  4,000*  41.5%  0.75  4.2500  done",
        "dp_s2·tp2          4  bf16         1,000*  4,000*  41.5%  0.75  4.2500  done",
        "* oversubscribed: more processes than cores, so that the speed says nothing",
    ]


@pytest.mark.parametrize(
    ("differing", "label"),
    [
        ({"seq_len": 8192}, "dp_s2 · seq_len 8,192"),
        ({"schedule": None, "ac": "full"}, "dp_s2 · full"),
        # A swept key says its name: its value alone says little.
        ({"point.optimizer.lr": "0.001"}, "dp_s2 · optimizer.lr 0.001"),
    ],
)
def test_the_label_of_a_recipe_is_its_layout_and_what_differs(differing, label):
    assert RecipeRuns("dp_s2", 2, differing, []).label == label


def test_a_column_is_told_only_where_it_tells_recipes_apart():
    rows = [row(precision="fp32", microbatch=4, dim=64), row("tp2", precision="fp32", microbatch=8, dim=64)]
    # The microbatch follows from the layout.
    assert [dict(group.differing) for group in groups(rows)] == [{}, {}]
    rows.append(row(precision="fp32", microbatch=2, dim=64))
    assert [group.label for group in groups(rows)] == [
        "dp_s2 · microbatch 4",
        "tp2 · microbatch 8",
        "dp_s2 · microbatch 2",
    ]


def test_two_keys_that_change_together_are_told_by_one():
    rows = [row(**{"point.a": "1", "point.b": "x"}), row(**{"point.a": "2", "point.b": "y"})]
    assert [group.label for group in groups(rows)] == ["dp_s2 · a 1", "dp_s2 · a 2"]


def test_the_control_is_a_recipe_of_its_own():
    rows = [row(control=None), row(control=True, speed=900.0), row(control=False)]
    recipe, control = groups(rows)
    assert (len(recipe.rows), recipe.is_control) == (2, False)
    assert (len(control.rows), control.is_control) == (1, True)
    assert [line.split()[0:2] for line in comparison(rows)[1:]] == [["dp_s2", "2"], ["dp_s2", "(control)"]]


def test_figures_are_of_the_runs_that_are_done_and_have_a_value():
    (group,) = groups([row(speed=1.0), row(speed=4.0), row(speed=None), row(speed=9.0, outcome="oom")])
    assert group.values("tokens_per_second") == [1.0, 4.0]
    # The same figure as in a ranking, which compares ratios: their median is 2.5.
    assert group.typical("tokens_per_second") == pytest.approx(2.0)
    assert group.typical("loss") is None
    (line,) = comparison(group.rows)[1:]
    assert line.split() == ["dp_s2", "2", "2", "40.0%", "1.00", "3", "done,", "1", "oom"]


def facts(**given):
    plain = {"speed": None, "memory_gib": None, "mfu_percent": None, "started": None, "world": None}
    return dict(row_details(row(**{**plain, **given})))


def test_of_a_run_of_which_nothing_is_known_only_the_state_is_told():
    assert facts(state="missing", outcome=None) == {"state": "missing"}
    silent = facts(oversubscribed=True, stale=False, attempt=0, cause="", steps=10)
    assert silent == {"state": "done"}


def test_each_fact_has_its_words():
    given = {"outcome": "oom", "cause": "no memory", "rank": 0, "exit_code": 0, "step": 0, "steps": 10}
    given |= {"attempt": 2, "previous_outcome": "hang", "parent_run": "a/b-1", "parent_step": 6, "seconds_left": 75.0}
    given |= {"world": 4, "device": "CPU", "precision": "fp8", "ac": "full", "schedule": "1f1b"}
    given |= {"compile": "blocks+loss", "loss": 4.25, "validation_loss": 0.0, "speed": 12345.6, "mfu_percent": 41.46}
    given |= {"oversubscribed": True, "memory_gib": 0.754, "launcher": "slurm", "job_id": "12_1"}
    given |= {"scheduler_state": "RUNNING", "queue_reason": "Resources", "stale": True, "folder": "/runs/a"}
    assert facts(**given, tracker_gap="3 steps are missing") == {
        "state": "oom",
        "cause": "no memory",
        # Zero is a value.
        "rank": 0,
        "exit code": 0,
        "step": "0 of 10",
        "attempt": "2, after hang",
        "began from": "step 6 of a/b-1",
        "time left": "1:15",
        "layout": "dp_s2, 4 processes on CPU",
        "techniques": "fp8, full, 1f1b, compiled blocks+loss",
        "loss": "4.2500",
        "validation loss": "0.0000",
        "speed": "12,346 tokens/s per device, MFU 41.5% (oversubscribed: more processes than cores)",
        "memory": "0.75 GiB",
        "job": "slurm 12_1 RUNNING",
        "waits for": "Resources",
        "tracker": "3 steps are missing",
        "code": "differs from the present code",
        "folder": "/runs/a",
    }
    assert facts(precision="bf16", ac="none", compile="off")["techniques"] == "bf16"
    assert facts(attempt=2)["attempt"] == 2


def test_moments_are_those_of_this_place():
    found = facts(started=1000.0, ended=2000.5)
    assert found["started"] == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1000))
    assert found["ended"] == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(2000))


def explained(made, run):
    (found,) = SweepTable(made.folder).rows()
    return failure_text(run, found)


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(made):
    begin(run := made.run("a"))
    (run.logs / "rank-0.log").unlink(missing_ok=True)
    os.mkfifo(run.logs / "rank-0.log")
    end(run, "crash")
    assert explained(made, run) is None


@pytest.mark.parametrize(("own", "shown"), [("of the result\n\n", "of the result"), (None, "of rank 3")])
def test_the_traceback_is_the_results_or_else_that_of_the_rank_that_failed(made, own, shown):
    begin(run := made.run("a"))
    crash = Outcome(kind=OutcomeKind.CRASH, step=4, attempt=1, cause="boom")
    for rank in (1, 3):
        run.write_failure(replace(crash, rank=rank, traceback=f"of rank {rank}\n"))
    end(run, "crash", rank=3, cause="boom", traceback=own)
    assert explained(made, run) == ("traceback of rank 3", shown)


def test_sweeps_are_counted_by_how_their_runs_ended(tmp_path):
    made = Made(tmp_path / "runs", "first")
    for place, kind in enumerate(["oom", "done", "done"]):
        begin(run := made.run(f"r{place}", seed=place))
        train(run)
        end(run, kind)
    begin(running := made.run("running", seed=10))
    train(running)
    made.run("waiting", seed=11)
    (broken := made.run("broken", seed=12)).path.joinpath("status.json").write_text("{")
    assert broken.path.is_dir()
    made.drop("rule", "no", parallelism="tp3")
    made.drop("where", "no", parallelism="tp5")
    (found,) = overview(tmp_path / "runs")
    assert {key: value for key, value in found.items() if key != "updated"} == {
        "sweep": "first",
        "runs": 6,
        "states": {"done": 2, "oom": 1, "prepared": 1, "running": 1, "unreadable": 1},
        "dropped": 2,
        "folder": str(tmp_path / "runs" / "first"),
    }
    # As one reads it: ends first, then what is under way.
    assert list(found["states"]) == ["done", "oom", "prepared", "running", "unreadable"]


def test_the_sweep_that_was_heard_of_last_is_first(tmp_path):
    times = {"new": time.time() - 1000, "middle": time.time() - 2000, "old": time.time() - 3000}
    for name, updated in times.items():
        begin(run := Made(tmp_path / "runs", name).run("a"))
        # This host sees no process of another one.
        train(run, updated=updated, host="elsewhere")
    unread = Made(tmp_path / "runs", "unread").run("a")
    (unread.path / "status.json").write_text("{")
    # Made just now.
    Made(tmp_path / "runs", "waits").run("a")
    found = overview(tmp_path / "runs")
    assert [row["sweep"] for row in found] == ["waits", "new", "middle", "old", "unread"]
    assert [row["updated"] for row in found[1:]] == [*times.values(), None]


def test_a_run_whose_processes_were_all_killed_gets_its_result_from_whoever_looks(tmp_path):
    made = Made(tmp_path / "runs", "first")
    direct, queued = made.run("direct"), made.run("queued", seed=1)
    for run in (direct, queued):
        begin(run)
        # A process that is no more.
        train(run, updated=time.time() - 60, pid=2**22 + 1)
    # What becomes of it, its job's scheduler knows.
    made.submit(queued)
    (found,) = overview(tmp_path / "runs")
    assert found["states"] == {"crash": 1, "running": 1}
    assert direct.result().cause.startswith("its processes left no result: they were killed")
    assert queued.result() is None


def test_a_sweep_whose_plan_is_damaged_hides_no_other(tmp_path):
    for name in ("first", "second"):
        begin(run := Made(tmp_path / "runs", name).run("r", seed=1))
        train(run)
        end(run, "done")
    (tmp_path / "runs" / "first" / "points.jsonl").write_text('{"point": ')
    rows = {row["sweep"]: row["states"] for row in overview(tmp_path / "runs")}
    assert rows == {"first": {"done": 1, "unreadable": 1}, "second": {"done": 1}}
