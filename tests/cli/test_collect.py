"""`titanlab collect`: the table's files, and what is said of the sweep; tests/sweep/table has what is in them."""

import json

import pytest
from pyarrow import parquet

from tests.sweep.made import SUMMARY, Made, begin, end
from titanlab.costs import meter
from titanlab.techniques.tracker.contract import FINISHED, RECORD_FILE, Record, write_record

VERB = "collect"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A sweep of three runs, of which one is done, and a point that was dropped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sweep = Made(tmp_path / "runs")
    for name, kind, given in (
        ("fsdp", "done", {"shard": 2}),
        ("tp", "crash", {"tensor": 2}),
        ("cp", "oom", {"context": 2}),
    ):
        run = sweep.run(name, **given)
        begin(run)
        end(run, kind, cause=None if kind == "done" else f"the cause of {name}")
    sweep.drop("rule", "must divide 4 heads", parallelism="tp3")
    return sweep


def test_the_table_is_beside_the_runs_and_the_recipes_are_compared(made, shown):
    said = shown("layouts").splitlines()
    assert said[0] == "layouts: 3 runs"
    assert said[1].split() == ["layout", "processes", *"tokens/s of all MFU GiB loss outcome".split()]
    # Failures and dropped points come after the comparison.
    below = [text for line in said for text in ("of all", "cause of tp", "cause of cp", "1 by rule") if text in line]
    assert below == ["of all", "cause of tp", "cause of cp", "1 by rule"]
    assert said[-2:] == ["table: runs/layouts/layouts.parquet", "table: runs/layouts/layouts.csv"]
    table = parquet.read_table("runs/layouts/layouts.parquet").to_pylist()
    assert len(table) == 4
    # Of a run that was submitted without an estimate it is made now, or it says why there is none.
    assert table[0]["estimate.step_seconds"] is not None or table[0]["estimate.note"]


def test_what_a_tracker_lacks_and_how_a_control_drifts_are_said(made, shown):
    lacking = made.run("lacking", seed=5)
    begin(lacking, tracker={**lacking.config()["tracker"], "kind": "tensorboard"})
    write_record(
        lacking.attempt_folder(1) / RECORD_FILE, Record(attempt=1, kind="tensorboard", state=FINISHED, left_out=3)
    )
    end(lacking)
    for repeat, speed in enumerate((1000.0, 900.0)):
        run = made.run("control", repeat=repeat, seed=7)
        made.points[-1]["control"] = True
        begin(run)
        env = json.loads((run.path / "env.json").read_text()) | {"time": 1000.0 + 60 * repeat}
        for path in run.path.rglob("env.json"):
            path.write_text(json.dumps(env))
        end(run, metrics={**SUMMARY, meter.TOKENS_PER_SECOND: speed})
    made.write()
    out = shown("layouts")
    assert (
        f"  {lacking.path.name}: tensorboard: lacks 3 rows, because the tracker could not keep up; titanlab sync "
        in out
    )
    assert "  Drift: the control's tokens/s per device went 10.0% down in 1:00 (2 runs)" in out


@pytest.mark.parametrize("into", ["else/where", "~/else/where"])
def test_the_files_go_where_they_are_wanted(made, shown, tmp_path, into):
    folder = tmp_path / into.replace("~", "home")
    assert shown("layouts", "--into", into).splitlines()[-1] == f"table: {folder.relative_to(tmp_path)}/layouts.csv"
    assert sorted(path.name for path in folder.iterdir()) == ["layouts.csv", "layouts.parquet"]
    assert list(made.folder.path.glob("layouts.*")) == []
