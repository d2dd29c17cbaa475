"""`titanlab plan --calibrate`: from the runs of a sweep to a file that `cluster=NAME` takes."""

from __future__ import annotations

import json

import yaml

from tests.sweep.made import Made, begin, end
from titanlab.cli import main


def test_a_sweep_becomes_a_cluster_that_a_plan_takes(plan, sweep, capsys):
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
