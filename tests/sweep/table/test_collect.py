"""What `titanlab collect` writes: the same types whatever the values."""

import csv
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.sweep.made import begin, end
from titanlab.errors import ConfigError
from titanlab.sweep import NAMES, SweepTable, write_table
from titanlab.sweep.rows import COLUMNS, SCHEMA_KEY, SWEEP_KEY


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


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--into=.*: cannot be written"):
        write_table([], "s", tmp_path / "file" / "deeper")


def test_a_value_of_another_kind_than_its_column_is_not_known(made, tmp_path):
    run = made.run("a")
    begin(run)
    end(run)
    git = {"sha": ["a"], "dirty": {}}
    code, host = {"fingerprint": "c0de", "git": git}, {"name": "h", "usable_cores": 10**30}
    damaged = {"time": "soon", "launcher": ["a"], "code": code, "packages": {"torch": ["b"]}, "host": host}
    for path in run.path.rglob("env.json"):
        path.write_text(json.dumps(damaged))
    write_table(SweepTable(made.folder).rows(), "layouts", tmp_path)
    (row,) = parquet.read_table(tmp_path / "layouts.parquet").to_pylist()
    names = ("started", "launcher", "git_commit", "git_dirty", "torch", "cores")
    assert [row[name] for name in names] == [None] * 6
    assert (row["outcome"], row["loss"], row["code"], row["hosts"]) == ("done", 4.25, "c0de", 1)


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
