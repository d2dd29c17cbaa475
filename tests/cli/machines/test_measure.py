"""`titanlab plan --measure`: one job, and a file that `cluster=NAME` takes."""

from __future__ import annotations

import pytest
import yaml


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
