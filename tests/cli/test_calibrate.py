"""`titanlab plan --calibrate` and `--measure`: from runs, or one job, to a file that `cluster=NAME` takes."""

from __future__ import annotations

import errno
import json
import os

import pytest
import yaml

from tests.sweep.made import SUMMARY, Made, begin, end
from titanlab.cli import main, plan_runs
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.recipe import Cluster

VERB = "plan"


@pytest.fixture
def plan(tmp_path, monkeypatch, say):
    monkeypatch.chdir(tmp_path)
    return say


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


def test_a_sweep_becomes_a_cluster_that_a_plan_takes(plan, sweep, capsys):
    code, out, err = plan("--calibrate", "layouts")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("layouts: 6 recipes in 6 runs on cpu, ")
    assert lines[1] == "6 of the runs ran other code than the present"
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
    # A sweep of such CPUs has estimates; others have none.
    for cluster, estimated in (("layouts", True), ("cpu", False)):
        dry = ("sweep", *arguments[:3], f"cluster={cluster}", "seed=1,2", "--dry-run")
        assert main(dry) == 0
        assert ("est. hours" in capsys.readouterr().out) is estimated
    # The sweep is still one, and its own file may be written again.
    assert plan("--calibrate", "layouts")[0] == 0


def test_too_few_runs(plan, tmp_path):
    made = Made(tmp_path / "runs", "few")
    run = made.run("one")
    begin(run)
    end(run)
    code, _, err = plan("--calibrate", "few")
    assert code == 2
    assert "a calibration needs at least 4" in err


def test_the_file_goes_where_it_is_wanted(plan, sweep, tmp_path):
    code, out, _ = plan("--calibrate", "layouts", "--out", "mine/cluster/cores.yaml", "--runs", str(tmp_path / "runs"))
    assert code == 0
    assert out.splitlines()[-1] == "use it: titanlab plan --config-dir mine cluster=cores …"
    assert (tmp_path / "mine" / "cluster" / "cores.yaml").is_file()


def test_a_full_disk_is_one_line(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(plan_runs, "write_text", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        plan_runs.write_cluster(tmp_path / "cluster" / "cores.yaml", Cluster(), "Measured.")


@pytest.mark.full
def test_a_measurement_is_one_job_and_a_file(plan, tmp_path):
    small = ("profiler.seconds=0.005", "profiler.largest=64", "profiler.megabytes=1")
    code, out, err = plan("--measure", "world=2", "cluster=cpu", "--out", "mine/cluster/here.yaml", *small)
    assert code == 0
    assert "µs, 2 ranks of a node" in out
    values = yaml.safe_load((tmp_path / "mine" / "cluster" / "here.yaml").read_text())
    # Beside other work, messages of a megabyte may take no longer than short ones; then the file has no bandwidth.
    assert values.get("link_gb_per_second", 0) > 0 or "no bandwidth of the link" in out + err
    assert values["memory_gb"] > 0
    code, out, _ = plan("--config-dir", "mine", "model=debug", "cluster=here", "world=2", "--top", "1")
    assert code == 0
    assert "no rates of these CPUs" not in out
