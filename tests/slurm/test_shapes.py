"""Jobs of one sweep that need 1, 2, 4 and 8 processes: what Slurm gave them, how they trained, and their table."""

import csv

import pandas
import pytest

pytestmark = pytest.mark.slurm

NODES = {"one": 1, "two": 1, "four": 2, "eight": 4}
PROCESSES = {"one": 1, "two": 2, "four": 4, "eight": 8}


def test_each_job_gets_its_own_shape(site, submitted):
    site.ended("shapes")
    for name, nodes in NODES.items():
        job = site.job_id(site.run("shapes", name))
        rows = {row["JobID"]: row for row in site.accounting(f"--jobs={job}")}
        assert (rows[job]["State"], rows[job]["ExitCode"]) == ("COMPLETED", "0:0")
        # The step in which srun started the processes.
        step = rows[f"{job}.0"]
        assert (int(step["NNodes"]), int(step["NTasks"])) == (nodes, PROCESSES[name])
    # One array for each shape.
    assert len(site.sweep("shapes").submissions()) == len(NODES)


def test_each_trains_and_lands_in_the_table(site, submitted):
    site.ended("shapes")
    said = site.titanlab("collect", "shapes")
    assert said.code == 0, said.err
    with (site.folder / "runs" / "shapes" / "shapes.csv").open() as file:
        rows = {row["name"] or row["cause"]: row for row in csv.DictReader(file)}
    for name, processes in PROCESSES.items():
        row = rows[name]
        assert (row["state"], row["outcome"], row["step"], row["world"]) == ("ended", "done", "6", str(processes))
        assert row["scheduler_state"] == "COMPLETED"
        assert float(row["loss"]) > 0
    table = pandas.read_parquet(site.folder / "runs" / "shapes" / "shapes.parquet")
    assert list(table.columns) == list(next(iter(rows.values())))
    # The same training, whatever the layout.
    by_name = table.set_index("name").loss
    assert [by_name[name] for name in PROCESSES] == pytest.approx([by_name["one"]] * 4, abs=2e-3)


def test_infeasible_points_have_reasons(site, submitted):
    dropped = [row for row in site.rows("shapes").values() if row["state"] == "dropped"]
    assert [(row["point.name"], row["outcome"]) for row in dropped] == [
        ("heads", "infeasible"),
        ("batch", "infeasible"),
    ]
    assert "parallelism.tensor=8" in dropped[0]["cause"]
    assert "training.global_batch=3" in dropped[1]["cause"]


def test_what_is_there_is_not_submitted_again(site, submitted):
    command = submitted.words["shapes"]
    before = site.sweep("shapes").submissions()
    # Whatever has become of them by now.
    again = site.titanlab(*command)
    site.ended("shapes")
    done = site.titanlab(*command)
    assert (again.code, done.code) == (0, 0)
    assert "submitted 0" in again.out
    assert "submitted 0" in done.out
    assert site.sweep("shapes").submissions() == before
    rows = site.accounting(columns="JobID,JobName")
    names = {each.job_name("shapes") for each in before}
    assert len([row for row in rows if row["JobName"] in names]) == len(NODES)
