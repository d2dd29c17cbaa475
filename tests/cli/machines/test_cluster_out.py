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


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--calibrate", "layouts", "--out", "cores.yaml"], "must lie in a folder named cluster"),
        (["--calibrate", "layouts", "--out", "cluster/cores.json"], "is no name of a cluster file"),
        (["--calibrate", "layouts", "--out", "cluster/h100.yaml"], "try cluster/my_h100.yaml"),
        (["--calibrate", "layouts", "--out", "cluster/own.yaml"], "is a file that titanlab has not written"),
        (
            ["--calibrate", "layouts", "--out", "/proc/cluster/cores.yaml"],
            "cannot be written: No such file or directory",
        ),
        (["--calibrate", "layouts", "--top", "3"], "makes no plan, which --top is about"),
        (["--measure", "--trace"], "makes no plan, which --trace is about"),
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


def test_a_full_disk_is_one_line(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(plan_runs, "write_text", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        plan_runs.write_cluster(tmp_path / "cluster" / "cores.yaml", Cluster(), "Measured.")
