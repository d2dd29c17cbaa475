"""`titanlab plan --measure`: one job, and a file that `cluster=NAME` takes."""

from __future__ import annotations

import pytest
import yaml


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--measure", "--explain"], "makes no plan, which --explain is about"),
        (["--measure", "--runs", "runs"], "write runs=runs"),
        (["--measure", "model=llama_5m"], "model=llama_5m: is the measurement's own"),
        (["--measure", "+recipe=quickstart"], "is the measurement's own"),
        (["--measure", "launch=local,slurm"], "launch"),
        (["--measure", "launch=slurm", "cluster=local"], "how many processes a node takes"),
        (["--measure", "--out", "x.yaml"], "must lie in a folder named cluster"),
        (["--measure", "profiler.seconds=0"], "profiler.seconds"),
    ],
)
def test_mistakes_are_one_line(plan, arguments, complaint):
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1


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
