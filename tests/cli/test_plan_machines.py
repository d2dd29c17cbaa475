"""`titanlab plan --calibrate` and `--measure`: from runs, or from one job, to a file that `cluster=NAME` takes."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.sweep.made import SUMMARY, Made, begin, end
from titanlab.cli import main
from titanlab.costs import meter


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """`plan("--measure")`: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["plan", *arguments])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def sweep(tmp_path):
    """A sweep of six recipes that are done, and one that waits."""
    made = Made(tmp_path / "runs", "layouts")
    for number, layout in enumerate(
        ({}, {"replicate": 2}, {"shard": 2}, {"tensor": 2}, {"context": 2}, {"seq_len": 64})
    ):
        run = made.run(f"r{number}", **layout)
        begin(run)
        end(run, metrics={**SUMMARY, meter.STEP_SECONDS: 0.02 + 0.01 * number})
    made.run("waits", seed=9)
    return made


def test_a_sweep_becomes_a_cluster_that_a_plan_takes(plan, sweep, tmp_path):
    code, out, err = plan("--calibrate", "layouts")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("layouts: 6 recipes in 6 runs on cpu, ")
    assert lines[1] == "6 of them made by other code than is here now"
    assert lines[2].startswith("left out 1: has not begun (waits-")
    path = sweep.folder.path / "cluster" / "layouts.yaml"
    assert lines[-2] == f"cluster file: {path}"
    assert lines[-1] == f"use it: titanlab plan --config-dir {sweep.folder.path} cluster=layouts …"
    values = yaml.safe_load(path.read_text())
    assert values["process_gb"] > 0
    arguments = (
        "--config-dir",
        str(sweep.folder.path),
        "model=debug",
        "cluster=layouts",
        "world=2",
        "--top",
        "1",
        "--json",
    )
    code, out, err = plan(*arguments)
    assert (code, err) == (0, "")
    best = json.loads(out)["best"][0]
    assert best["reserved_bytes"] >= values["process_gb"] * 1e9
    # The sweep is still one, and its own file may be written again.
    assert plan("--calibrate", "layouts")[0] == 0


def test_the_file_goes_where_it_is_wanted(plan, sweep, tmp_path):
    code, out, _ = plan("--calibrate", "layouts", "--out", "mine/cluster/cores.yaml", "--runs", str(tmp_path / "runs"))
    assert code == 0
    assert out.splitlines()[-1] == "use it: titanlab plan --config-dir mine cluster=cores …"
    assert (tmp_path / "mine" / "cluster" / "cores.yaml").is_file()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--calibrate", "nothing"], "sweep=nothing: is no sweep under runs; try layouts"),
        (["--calibrate", "layouts", "--out", "cores.yaml"], "must lie in a folder named cluster"),
        (["--calibrate", "layouts", "--out", "cluster/cores.json"], "is no name of a cluster file"),
        (["--calibrate", "layouts", "--out", "cluster/h100.yaml"], "try cluster/my_h100.yaml"),
        (["--calibrate", "layouts", "--out", "cluster/own.yaml"], "is a file that titanlab has not written"),
        (["--calibrate", "layouts", "--measure"], "leave one out"),
        (["--calibrate", "layouts", "--why"], "makes no plan, which --why is about"),
        (["--calibrate", "layouts", "cluster=h100"], "takes recipes and cluster from the runs"),
        (["--calibrate"], "expected one argument"),
        (["--measure", "--explain"], "makes no plan, which --explain is about"),
        (["--measure", "--runs", "runs"], "write runs=runs"),
        (["--measure", "model=llama_5m"], "model=llama_5m: is the measurement's own"),
        (["--measure", "+recipe=quickstart"], "is the measurement's own"),
        (["--measure", "launch=local,slurm"], "launch"),
        (["--measure", "launch=slurm", "cluster=local"], "how many processes a node takes"),
        (["--measure", "--out", "x.yaml"], "must lie in a folder named cluster"),
        (["--measure", "profiler.seconds=0"], "profiler.seconds"),
        (["cluster=cpu", "--out", "cluster/a.yaml"], "belongs to --calibrate or --measure"),
        (["cluster=cpu", "--runs", "runs"], "belongs to --calibrate"),
    ],
)
def test_mistakes_are_one_line(plan, sweep, tmp_path, arguments, complaint):
    (tmp_path / "cluster").mkdir()
    own = tmp_path / "cluster" / "own.yaml"
    own.write_text("defaults: [schema]\n")
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1
    assert own.read_text() == "defaults: [schema]\n"


def test_too_few_runs(plan, tmp_path):
    made = Made(tmp_path / "runs", "few")
    run = made.run("one")
    begin(run)
    end(run)
    code, _, err = plan("--calibrate", "few")
    assert code == 2
    assert "a calibration needs at least 4" in err


@pytest.mark.full
def test_a_measurement_is_one_job_and_a_file(plan, tmp_path):
    small = ("profiler.seconds=0.005", "profiler.largest=64", "profiler.megabytes=1")
    code, out, _ = plan("--measure", "world=2", "cluster=cpu", "--out", "mine/cluster/here.yaml", *small)
    assert code == 0
    assert "µs, 2 ranks of a node" in out
    values = yaml.safe_load((tmp_path / "mine" / "cluster" / "here.yaml").read_text())
    assert values["link_gb_per_second"] > 0
    assert values["memory_gb"] > 0
    code, out, _ = plan("--config-dir", "mine", "model=debug", "cluster=here", "world=2", "--top", "1")
    assert code == 0
    assert "no rates of these CPUs" not in out
