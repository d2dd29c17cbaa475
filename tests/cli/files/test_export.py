"""`titanlab export`: which flags go with which format, and output that nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.weights.huggingface import made as folders
from titanlab.cli import main
from titanlab.weights.interchange import is_weights


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--format dcp --force", "--force=true: is of --format hf or titanlab, and the format is dcp; leave it out"),
        ("--format dcp --shard-size 1GB", "--shard-size=1GB: is of --format hf or titanlab, and the format is dcp; leave it"),
        ("--format dcp --name x", "--name=x: is of --format titanlab, and the format is dcp; leave it out"),
        ("--name x", "--name=x: is of --format titanlab, and the format is hf; leave it out"),
        ("--names torchtitan", "--names=torchtitan: is of --format dcp, and the format is hf; leave it out"),
    ],
)  # fmt: skip
def test_a_flag_of_another_format_is_refused(tmp_path, monkeypatch, capsys, flags, line):
    """It was dropped without a word: --force did not replace, and files had another size."""
    monkeypatch.chdir(tmp_path)
    theirs = folders.folder(tmp_path / "hub")
    assert main(["export", str(theirs), "--into", "out", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")
    assert not (tmp_path / "out").exists()


def test_the_formats_take_their_own_flags(tmp_path, capsys):
    theirs = folders.folder(tmp_path / "hub")
    for form, flags in {"hf": "--shard-size 100KB", "titanlab": "--name mine --shard-size 100KB"}.items():
        into = tmp_path / form
        for force in ([], ["--force"]):
            assert main(["export", str(theirs), "--into", str(into), "--format", form, *flags.split(), *force]) == 0
        assert len(list(into.glob("*.safetensors"))) > 1
    assert (tmp_path / "titanlab" / "conf" / "model" / "mine.yaml").is_file()


def test_the_weights_are_written_also_if_nobody_reads_the_output(tmp_path):
    theirs = folders.folder(tmp_path / "hub")
    shell = f'mkfifo {tmp_path}/p; (exec <{tmp_path}/p) & exec 3>{tmp_path}/p; wait; "$@" >&3'
    arguments = ["export", str(theirs), "--into", str(tmp_path / "out"), "--format", "titanlab"]
    done = subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, "-m", "titanlab", *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert is_weights(tmp_path / "out")
