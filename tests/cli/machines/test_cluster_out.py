"""Where a cluster file may be written."""

from __future__ import annotations

import errno
import os

import pytest

from titanlab.cli import plan_runs
from titanlab.errors import ConfigError
from titanlab.recipe import Cluster


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
