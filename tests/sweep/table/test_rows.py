"""The rows of a sweep: every state that a run can be in, from made folders."""

import json
import time

import pytest

from tests.sweep.made import begin, end, train, word
from titanlab.costs import AXES
from titanlab.sweep import NAMES, SweepTable, point_keys
from titanlab.sweep.listing import cells
from titanlab.sweep.watch import settled


def row_of(made, run, states=None, **given):
    (row,) = [row for row in SweepTable(made.folder, **given).rows(states) if row["run"] == run.path.name]
    return row


def test_every_row_has_every_column_whatever_happened(made):
    done, waits = made.run("a", shard=2), made.run("b")
    begin(done)
    end(done)
    made.drop("rule", "reason", seed=1)
    rows = SweepTable(made.folder).rows()
    assert {tuple(row) for row in rows} == {(*NAMES, "point.parallelism", "point.seed")}
    assert [row["run"] for row in rows] == [done.path.name, waits.path.name, None]
    assert point_keys(rows) == ["point.parallelism", "point.seed"]


def test_a_run_that_is_done(made):
    run = made.run("fsdp_tp", shard=2, tensor=2, point={"parallelism": "fsdp_tp", "training.seq_len": 32})
    begin(run, cores=4, code="c0de")
    end(run)
    row = row_of(made, run, code="other")
    assert (row["sweep"], row["name"], row["hash8"], row["repeat"]) == ("layouts", "fsdp_tp", run.hash8, 0)
    assert (row["state"], row["outcome"], row["previous_outcome"], row["cause"]) == ("ended", "done", None, None)
    assert (row["step"], row["steps"], row["attempt"]) == (10, 10, 1)
    assert [row[f"layout.{axis}"] for axis in AXES] == [1, 1, 2, 1, 2]
    assert (row["layout.label"], row["world"]) == ("dp_s2·tp2", 4)
    assert (row["precision"], row["ac"], row["compile"], row["schedule"]) == ("fp32", "none", "off", None)
    assert (row["tokens_per_second"], row["tokens_per_second_all"], row["mfu_percent"]) == (1000.0, 4000.0, 41.5)
    assert (row["step_seconds"], row["measured_steps"], row["memory_gib"]) == (0.25, 7, 0.75)
    assert (row["first_loss"], row["loss"], row["validation_loss"], row["seconds_left"]) == (5.5, 4.25, None, None)
    assert (row["started"], row["ended"], row["train_seconds"]) == (1000.0, 2000.0, 2.5)
    assert (row["code"], row["stale"]) == ("c0de", True)
    assert row_of(made, run, code="c0de")["stale"] is False
    assert row["skipped_steps"] is None
    assert row["folder"] == str(run.path)
    # As one types them.
    assert (row["point.parallelism"], row["point.training.seq_len"]) == ("fsdp_tp", "32")


def test_a_run_under_way_has_the_figures_of_its_latest_row(made):
    run = made.run("a", shard=2)
    begin(run)
    train(run, step=6, seconds_left=75.0)
    row = row_of(made, run)
    assert (row["state"], row["outcome"], row["step"], row["steps"]) == ("running", None, 6, 10)
    assert (row["tokens_per_second"], row["step_seconds"], row["loss"]) == (900.0, 0.3, 4.25)
    assert (row["seconds_left"], row["measured_steps"], row["ended"]) == (75.0, None, None)
    assert row["updated"] == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(
    ("status", "told", "state"),
    [
        ("prepared", None, "queued"),  # its scheduler does not answer
        ("prepared", word("unknown"), "queued"),
        ("prepared", word("pending", "PENDING", "Resources"), "queued"),
        ("prepared", word("running", "RUNNING"), "starting"),
        ("running", word("running", "RUNNING"), "running"),
        ("saving", word("running", "RUNNING"), "saving"),
        ("running", word("unknown"), "running"),
    ],
)
def test_the_state_is_the_runs_own_but_for_what_only_the_scheduler_knows(made, status, told, state):
    other, run = made.run("other", seed=1), made.run("a")
    submitted = made.submit(other, run)
    if status != "prepared":
        begin(run)
        train(run, state=status)
    row = row_of(made, run, {(submitted.token, 1): told} if told else None)
    assert row["state"] == state
    assert (row["launcher"], row["job_id"]) == ("slurm", "12_1")
    assert row["scheduler_state"] == (told.raw if told else None)
    assert row["queue_reason"] == (told.reason if told else None)


def test_a_preempted_run_that_waits_to_go_on_has_not_ended(made):
    run = made.run("a")
    submitted = made.submit(run)
    begin(run, job={"token": submitted.token, "index": 0, "job_id": "12_0", "nodes": ["n1"]})
    train(run)
    end(run, "preempted", cause="asked to end", scheduler={"state": "PREEMPTED"})
    states = {(submitted.token, 0): word("requeued", "PENDING", "BeginTime")}
    row = row_of(made, run, states)
    assert (row["state"], row["outcome"], row["previous_outcome"]) == ("queued", None, "preempted")
    assert (row["cause"], row["queue_reason"]) == (None, "BeginTime")
    begin(run)
    train(run)
    row = row_of(made, run, {(submitted.token, 0): word("running")})
    assert (row["state"], row["attempt"], row["previous_outcome"]) == ("running", 2, "preempted")
    assert row["restarts"] == 0
    (run.attempt_folder(2) / "restart.json").write_text("{}")
    assert row_of(made, run)["restarts"] == 1
    end(run)
    row = row_of(made, run, {(submitted.token, 0): word("ended", "COMPLETED")})
    assert (row["state"], row["outcome"], row["previous_outcome"]) == ("ended", "done", "preempted")
    assert row["scheduler_state"] == "COMPLETED"


@pytest.mark.parametrize("kind", ["preempted", "walltime", "node_fail"])
def test_a_run_between_its_result_and_its_requeue_has_not_ended(made, kind):
    run = made.run("a")
    submitted = made.submit(run, created=1500.0, launch={"requeue": True})
    begin(run)
    train(run)
    end(run, kind)
    key = (submitted.token, 0)

    def state(said):
        row = row_of(made, run, {key: word(said)})
        # Only an end has an outcome.
        assert (row["outcome"] is None) == (row["state"] != "ended") == (not settled([row]))
        return row["state"], row["previous_outcome"]

    # The job ends itself, waits, and starts again; meanwhile Slurm may not answer.
    assert [state(said) for said in ("running", "requeued", "unknown", "running")] == [
        ("starting", kind),
        ("queued", kind),
        ("queued", kind),
        ("starting", kind),
    ]
    assert [state(said)[0] for said in ("ended", "gone")] == ["ended", "ended"]
    # Without a requeue, or without a word of the scheduler, the end is the end.
    made.submit(run, created=1500.0, token=submitted.token, launch={"requeue": False})
    assert state("running")[0] == "ended"
    assert row_of(made, run)["outcome"] == kind


def test_a_run_that_is_submitted_again_after_its_end_starts_anew(made):
    run = made.run("a")
    made.submit(run, created=1500.0)
    begin(run)
    end(run, "hang", ended=2000.0)
    again = made.submit(run, created=2500.0, job_id="13")
    row = row_of(made, run, {(again.token, 0): word("running")})
    assert (row["state"], row["previous_outcome"], row["job_id"]) == ("starting", "hang", "13_0")


def test_the_schedulers_word_for_an_end_stays(made):
    run = made.run("a")
    begin(run)
    end(run, "node_fail", scheduler={"job_id": "12_0", "state": "NODE_FAIL", "exit_code": "0:0"})
    assert row_of(made, run)["scheduler_state"] == "NODE_FAIL"


def test_the_layout_is_that_of_the_latest_attempt(made):
    run = made.run("a", shard=2)
    begin(run)
    end(run, "cancelled")
    config = run.config()
    begin(run, world=4, parallelism={**config["parallelism"], "shard": 4})
    end(run)
    assert (row_of(made, run)["layout.label"], row_of(made, run)["world"]) == ("dp_s4", 4)


def test_points_that_were_dropped_have_rows(made):
    made.drop("rule", "heads=3: no", parallelism="tp")
    made.drop("where", "world <= 8", parallelism="tp16")
    rows = SweepTable(made.folder).rows()
    assert [row["state"] for row in rows] == ["dropped", "dropped"]
    # A point that nobody wanted breaks no rule.
    assert [row["outcome"] for row in rows] == ["infeasible", None]
    assert [row["dropped_stage"] for row in rows] == ["rule", "where"]
    assert [row["cause"] for row in rows] == ["heads=3: no", "world <= 8"]
    assert [row["point.parallelism"] for row in rows] == ["tp", "tp16"]
    assert {row["run"] for row in rows} == {None}


def test_a_folder_that_is_gone_or_spoilt_hides_no_other(made):
    gone, spoilt, torn, whole, strange = (made.run(name, seed=place) for place, name in enumerate("abcde"))
    for run in (spoilt, torn, whole, strange):
        begin(run)
        end(run)
    (gone.path / "config.yaml").unlink()
    (spoilt.attempt_folder(1) / "config.yaml").write_text("a: [")
    strange.attempt_folder(1).joinpath("config.yaml").write_text("world: 1\n")
    value = json.loads((torn.path / "result.json").read_text())
    (torn.path / "result.json").write_text(json.dumps({**value, "schema": 99}))
    rows = {row["run"]: row for row in SweepTable(made.folder).rows()}
    assert [rows[run.path.name]["state"] for run in (gone, spoilt, torn, whole)] == [
        *("missing", "unreadable", "unreadable", "ended")
    ]
    assert "cannot be read" in rows[spoilt.path.name]["cause"]
    assert "schema 99" in rows[torn.path.name]["cause"]
    assert rows[strange.path.name]["state"] == "unreadable"


def test_runs_that_the_plan_no_longer_has_come_last(made):
    old, new = made.run("a"), made.run("b", seed=1)
    made.points = made.points[1:]
    made.write()
    rows = SweepTable(made.folder).rows()
    assert [row["run"] for row in rows] == [new.path.name, old.path.name]
    assert [row["point.parallelism"] for row in rows] == ["b", None]


def test_a_table_sees_what_changes(made):
    run = made.run("a")
    table = SweepTable(made.folder)
    assert table.rows()[0]["state"] == "prepared"
    begin(run)
    assert table.rows()[0]["state"] == "starting"
    train(run)
    assert table.rows()[0]["step"] == 4
    end(run)
    assert table.rows()[0]["outcome"] == "done"


def test_a_thousand_runs_take_a_second_or_two(made):
    run = made.run("a")
    begin(run)
    end(run)
    # CPU time: other work on the machine does not count.
    start = time.thread_time()
    for _ in range(50):
        assert row_of(made, run)["outcome"] == "done"
    # A whole table of one row each time: dearer than a thousand rows of one.
    assert (time.thread_time() - start) / 50 < 10e-3


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"code": "text", "packages": 7, "host": ["a"]},
        {"code": {"fingerprint": ["a"], "git": "b"}, "host": {"name": 5}},
    ],
)
def test_what_is_damaged_of_the_machine_and_the_code_is_not_known(made, damaged):
    run = made.run("a")
    begin(run)
    end(run)
    for path in run.path.rglob("env.json"):
        path.write_text(json.dumps(damaged))
    row = row_of(made, run, code="c0de")
    assert (row["outcome"], row["loss"]) == ("done", 4.25)
    assert (row["code"], row["stale"], row["git_commit"], row["torch"], row["cores"]) == (None,) * 5


def test_a_run_that_goes_on_names_its_stopped_rank(made):
    run = made.run("fsdp", shard=2)
    begin(run)
    train(run, step=6, updated=1000.0)
    run.keep_stopped(1, 1, "rank 1: its process is stopped (SIGSTOP) since 12:00:00")
    row = row_of(made, run)
    assert (row["state"], row["cause"], row["seconds_left"]) == (
        "running",
        "rank 1: its process is stopped (SIGSTOP) since 12:00:00",
        None,
    )
    assert cells(row, now=1400.0)[-1] == row["cause"]
    end(run)
    assert row_of(made, run)["cause"] is None
