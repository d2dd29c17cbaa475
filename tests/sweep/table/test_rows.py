"""The table of a sweep: its columns, its rows from made folders, repeated reads, and its files."""

from __future__ import annotations

import csv
import dataclasses
import json
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests import tiny
from tests.sweep.made import begin, end, train, word
from titanlab.costs import AXES, meter
from titanlab.errors import ConfigError
from titanlab.plan import machine_of
from titanlab.plan.step_time import step_time
from titanlab.recipe import Cluster
from titanlab.sweep import NAMES, SweepTable, figure_columns, fitting_value, look_at, write_table
from titanlab.sweep import rows as look
from titanlab.sweep.listing import cells
from titanlab.sweep.rows import COLUMNS, SCHEMA_KEY, SWEEP_KEY, estimate_columns, estimate_values, origin_columns
from titanlab.sweep.watch import settled
from titanlab.techniques.optimizer.optimizers_schema import AdamW

PAGE = (Path(__file__).parents[3] / "docs" / "comparing.md").read_text()


def test_the_page_has_every_column_and_no_other():
    section = PAGE.split("\n## Columns\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    told = {cells[0]: cells[1] for cells in lines if len(cells) == 3 and cells[0].startswith("`")}
    expected = {f"`{name}`": kind for name, kind in COLUMNS.items()}
    assert told == {**expected, "`point.KEY`": "text"}
    assert all(cells[2] for cells in lines if len(cells) == 3 and cells[0].startswith("`"))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("cause", "boom", "boom"),
        ("cause", 3, None),
        # The columns of a point are text.
        ("point.seed", "3", "3"),
        ("stale", False, False),
        ("stale", 1, None),
        ("step", 0, 0),
        ("step", True, None),
        ("step", 3.0, None),
        ("step", 2**63 - 1, 2**63 - 1),
        ("step", 2**63, None),
        ("loss", 4.25, 4.25),
        ("loss", 4, 4.0),
        # Parquet takes no whole number above 2**53 as a number: `titanlab collect` ended with a traceback.
        ("flops_per_token", 2**60 + 1, float(2**60)),
        ("flops_per_token", 10**400, None),
        # Half a pair of UTF-16, as a damaged JSON file has it.
        ("cause", "a\ud800b", "a?b"),
        ("loss", "4", None),
    ],
)
def test_a_value_of_another_kind_than_its_column_is_none(name, value, expected):
    found = fitting_value(name, value)
    assert (found, type(found)) == (expected, type(expected))


def test_each_figure_is_in_its_own_column():
    """Figures of one kind and size, which nobody could tell apart by their values."""
    metrics = {
        meter.TOKENS_PER_SECOND: 10.0,
        meter.STEP_SECONDS: 2.0,
        meter.STEP_SECONDS_LOW: 1.0,
        meter.STEP_SECONDS_HIGH: 3.0,
        "first_loss": 9.0,
        meter.LOSS: 4.0,
        meter.VALIDATION_LOSS: 5.0,
        meter.TRAIN_SECONDS: 60.0,
        meter.PAUSED_SECONDS: 6.0,
        meter.SKIPPED_STEPS: 3,
    }
    columns = figure_columns(metrics, world=4)
    assert (columns["tokens_per_second"], columns["tokens_per_second_all"]) == (10.0, 40.0)
    times = [columns[name] for name in ("step_seconds_q1", "step_seconds", "step_seconds_q3")]
    assert (times, columns["train_seconds"], columns["paused_seconds"]) == ([1.0, 2.0, 3.0], 60.0, 6.0)
    assert (columns["first_loss"], columns["loss"], columns["validation_loss"]) == (9.0, 4.0, 5.0)
    assert columns["skipped_steps"] == 3
    # A run under way has the last step's time and the median; the median is the figure.
    assert figure_columns({**metrics, meter.STEP_SECONDS_MEDIAN: 2.5}, world=1)["step_seconds"] == 2.5
    assert figure_columns({}, world=4)["tokens_per_second_all"] is None


RESIDENT = "memory/max_resident(GiB)"


@pytest.mark.parametrize(
    ("metrics", "world", "expected"),
    [
        ({RESIDENT: 0.5}, 1, (0.5, 0)),
        # Nobody has compared the ranks.
        ({RESIDENT: 0.5}, 2, (0.5, None)),
        ({meter.MEMORY_RESERVED: 2.0, RESIDENT: 9.0}, 1, (2.0, 0)),
        ({meter.MEMORY_RESERVED: 2.0, meter.MEMORY_MOST: 3.0, meter.MEMORY_MOST_RANK: 1}, 2, (3.0, 1)),
        ({meter.MEMORY_RESERVED: 4.0, meter.MEMORY_MOST: 3.0, meter.MEMORY_MOST_RANK: 1}, 2, (4.0, None)),
    ],
)
def test_memory_is_the_largest_peak_that_is_known(metrics, world, expected):
    columns = figure_columns(metrics, world=world)
    assert (columns["memory_gib"], columns["memory_rank"]) == expected


def test_an_mfu_says_what_it_is_a_share_of():
    known = {"peak_tflops": 989.4, "flops_convention": "6N", "peak_source": "data sheet"}
    assert figure_columns(known, world=1)["mfu_convention"] == "6N FLOPs a token, over 989.4 TFLOP/s (data sheet)"
    del known["peak_source"]
    assert figure_columns(known, world=1)["mfu_convention"].endswith("(unknown source)")
    assert figure_columns({"peak_tflops": 989.0}, world=1)["mfu_convention"] is None


@pytest.mark.parametrize(
    ("usable", "nodes", "world", "accelerator", "expected"),
    [
        (4, [], 4, "cpu", (1, 4, False)),
        (4, [], 5, "cpu", (1, 4, True)),
        (4, ["a.example.org", "b.example.org"], 8, "cpu", (2, 8, False)),
        # Names that no machine has: all of them are this one.
        (4, ["n1", "n2"], 8, "cpu", (1, 4, True)),
        (None, [], 8, "cpu", (1, None, None)),
        (1, [], 8, "cuda", (1, 1, False)),
        ("many", [], 8, "cpu", (None, None, None)),
    ],
)
def test_cores_are_those_of_all_hosts(usable, nodes, world, accelerator, expected):
    env = {"host": {"name": "a.cluster", "usable_cores": usable}, "code": {"git": {"sha": "abc", "dirty": True}}}
    columns = origin_columns(env, {"nodes": nodes}, {"world": world, "cluster": {"accelerator": accelerator}})
    assert tuple(columns.get(name) for name in ("hosts", "cores", "oversubscribed")) == expected
    assert (columns["git_commit"], columns["git_dirty"]) == ("abc", True)
    assert columns["host_names"] == (",".join(nodes) or "a.cluster")


def row_of(made, run, states=None, **given):
    (row,) = [row for row in SweepTable(made.folder, **given).rows(states) if row["run"] == run.path.name]
    return row


def test_a_run_that_is_done(made):
    point = {"parallelism": "fsdp_tp", "training.seq_len": 32, "optimizer.betas": [0.9, None], "compile": True}
    run = made.run("fsdp_tp", shard=2, tensor=2, point=point)
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
    assert [row[f"point.{key}"] for key in point] == ["fsdp_tp", "32", "[0.9, null]", "true"]


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


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"code": "text", "packages": 7, "host": ["a"]},
        {"code": {"fingerprint": ["a"], "git": "b"}, "host": {"name": 5}},
        {
            "time": "soon",
            "launcher": ["a"],
            "packages": {"torch": ["b"]},
            "host": {"name": "h", "usable_cores": 10**30},
            "code": {"git": {"sha": ["a"], "dirty": {}}},
        },
    ],
)
def test_what_is_damaged_of_the_machine_and_the_code_is_not_known(made, tmp_path, damaged):
    run = made.run("a")
    begin(run)
    end(run)
    for path in run.path.rglob("env.json"):
        path.write_text(json.dumps(damaged))
    write_table(SweepTable(made.folder, code="c0de").rows(), "layouts", tmp_path)
    (row,) = parquet.read_table(tmp_path / "layouts.parquet").to_pylist()
    assert (row["outcome"], row["loss"]) == ("done", 4.25)
    names = ("code", "stale", "git_commit", "git_dirty", "torch", "cores", "started", "launcher")
    assert [row[name] for name in names] == [None] * 8


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


H100 = Cluster(accelerator="cuda", device="NVIDIA H100 80GB HBM3")


def recipe(tmp_path, **given):
    return dataclasses.replace(tiny.recipe(tmp_path, shard=2), cluster=H100, **given)


def test_an_estimate_has_figures_of_one_device(tmp_path):
    made = recipe(tmp_path)
    values = estimate_values(made)
    assert values["note"] is None
    assert values["step_seconds"] == pytest.approx(step_time(made, machine_of(made)).seconds)
    assert values["tokens_per_second"] == pytest.approx(made.tokens_per_step / values["step_seconds"] / 2)
    assert 0 < values["memory_gib"] < 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class Careful(AdamW):
    """An optimizer of a package, with a rule of its own."""

    def __post_init__(self):
        super().__post_init__()
        if self.lr > 0.1:
            raise ConfigError("optimizer.lr", self.lr, "is too large for this optimizer", "try 0.1")


def test_what_is_shared_breaks_no_rule_of_an_optimizer(tmp_path):
    assert estimate_values(recipe(tmp_path, optimizer=Careful()))["note"] is None


def test_without_an_estimate_the_reason_is_there(tmp_path):
    values = estimate_values(tiny.recipe(tmp_path))
    assert (values["step_seconds"], values["memory_gib"]) == (None, None)
    assert "CPUs were not measured" in values["note"]
    unknown = dataclasses.replace(recipe(tmp_path), cluster=Cluster(accelerator="cuda", device="Abacus 9"))
    assert "cluster.device=Abacus 9: nothing is known of its speed" in estimate_values(unknown)["note"]


def test_an_estimate_of_another_layout_is_not_shown():
    kept = {"layout": "dp_s2", "step_seconds": 1.0, "tokens_per_second": 2.0, "memory_gib": 3.0, "note": None}
    assert estimate_columns(kept, "dp_s2")["estimate.memory_gib"] == 3.0
    (said,) = estimate_columns(kept, "tp2").values()
    assert "dp_s2" in said
    assert estimate_columns("damaged", "tp2") == {}


def test_a_row_has_the_estimate_that_was_kept_or_a_late_one(made):
    run = made.run("a", shard=2)
    begin(run)
    end(run)
    made.points[0]["estimate"] = {"layout": "dp_s2", "step_seconds": 0.5, "tokens_per_second": 7.0, "memory_gib": 2.0}
    made.write()
    (row,) = SweepTable(made.folder).rows()
    assert (row["estimate.step_seconds"], row["estimate.tokens_per_second"], row["estimate.memory_gib"]) == (
        0.5,
        7.0,
        2.0,
    )
    del made.points[0]["estimate"]
    made.write()
    (row,) = SweepTable(made.folder).rows()
    assert row["estimate.note"] is None
    (row,) = SweepTable(made.folder, estimates=True).rows()
    assert "CPUs were not measured" in row["estimate.note"]


@pytest.fixture
def asked(monkeypatch):
    """The times at which the scheduler was asked; it says that the first job runs, and that something is amiss."""
    times = []

    def reconcile(sweep, report):
        times.append(now[0])
        report("the scheduler is slow")
        return {(submission.token, 0): word("running", "RUNNING") for submission in sweep.submissions()}

    now = [0.0]
    monkeypatch.setattr(look, "reconcile", reconcile)
    return now, times


def test_a_scheduler_is_asked_every_ten_seconds_and_files_are_read_always(made, asked):
    now, times = asked
    run = made.run("a")
    made.submit(run, created=1500.0)
    rows = look_at(made.folder, clock=lambda: now[0])
    assert rows()[0]["state"] == "starting"
    begin(run)
    train(run, step=3)
    now[0] = 9.9
    assert (rows()[0]["state"], rows()[0]["step"]) == ("running", 3)
    assert times == [0.0]
    now[0] = 10.0
    end(run)
    assert rows()[0]["outcome"] == "done"
    assert times == [0.0, 10.0]


def test_a_message_is_told_once(made, asked):
    now, times = asked
    made.submit(made.run("a"))
    told = []
    rows = look_at(made.folder, told.append, clock=lambda: now[0])
    for second in (0.0, 20.0, 40.0):
        now[0] = second
        rows()
    assert (len(times), told) == (3, ["the scheduler is slow"])


def full(made):
    """A run that is done, one that failed, one that waits, one point that was dropped."""
    for place, kind in enumerate(("done", "crash", None)):
        run = made.run(f"r{place}", seed=place, point={"seed": place, "parallelism": "fsdp"}, shard=2)
        if kind:
            begin(run)
            end(run, kind, cause=None if kind == "done" else "boom,\nwith a comma")
    made.drop("rule", "no", seed=9)
    return SweepTable(made.folder, code="c0de").rows()


def test_parquet_and_csv_have_every_row_and_column(made, tmp_path):
    rows = full(made)
    files = write_table(rows, "layouts", tmp_path / "into")
    assert [path.name for path in files] == ["layouts.parquet", "layouts.csv"]
    table = parquet.read_table(files[0])
    assert table.column_names == [*NAMES, "point.seed", "point.parallelism"]
    assert table.to_pylist() == rows
    assert (table.schema.metadata[SCHEMA_KEY.encode()], table.schema.metadata[SWEEP_KEY.encode()]) == (b"2", b"layouts")
    with files[1].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["run"] for line in lines] == [row["run"] or "" for row in rows]
    assert lines[1]["cause"] == "boom,\nwith a comma"
    assert (lines[0]["stale"], lines[0]["rank"], float(lines[0]["loss"])) == ("false", "", 4.25)
    # Nothing else is left there.
    assert sorted(path.name for path in (tmp_path / "into").iterdir()) == ["layouts.csv", "layouts.parquet"]


def test_types_do_not_depend_on_values(made, tmp_path):
    made.drop("rule", "no", seed=1, parallelism="fsdp")
    write_table(SweepTable(made.folder).rows(), "empty", tmp_path)
    only_dropped = parquet.read_table(tmp_path / "empty.parquet").schema
    made.points.clear()
    write_table(full(made), "full", tmp_path)
    everything = parquet.read_table(tmp_path / "full.parquet").schema
    assert {field.name: field.type for field in only_dropped} == {field.name: field.type for field in everything}
    words = {pa.string(): "text", pa.int64(): "whole", pa.float64(): "number", pa.bool_(): "yes/no"}
    points = {"point.seed": "text", "point.parallelism": "text"}
    assert {field.name: words[field.type] for field in everything} == {**COLUMNS, **points}


def test_a_cause_that_begins_like_a_formula_is_none_in_the_csv(made, tmp_path):
    causes = ["=HYPERLINK(1)", "+1+cmd", "-1", "@sum", "\t=1", "plain = text"]
    for place, cause in enumerate(causes):
        begin(run := made.run(f"r{place}", seed=place))
        end(run, "crash", cause=cause)
    parquet_file, csv_file = write_table(SweepTable(made.folder).rows(), "s", tmp_path)
    assert parquet.read_table(parquet_file)["cause"].to_pylist() == causes
    with csv_file.open(newline="") as file:
        found = [line["cause"] for line in csv.DictReader(file)]
    assert found == ["'=HYPERLINK(1)", "'+1+cmd", "-1", "'@sum", "'\t=1", "plain = text"]
