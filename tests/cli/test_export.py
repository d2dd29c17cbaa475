"""`titanlab export`: which flags go with which format, and output that nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from tests.weights import saved
from tests.weights.huggingface import made as folders
from titanlab.checkpoint import index as reader
from titanlab.checkpoint import loading, remove
from titanlab.checkpoint.folders import step_folder
from titanlab.cli import main
from titanlab.train import is_weights


def test_the_formats_take_their_own_flags(tmp_path, capsys):
    theirs = folders.folder(tmp_path / "hub")
    for form, flags in {"hf": "--shard-size 100KB", "titanlab": "--name mine --shard-size 100KB"}.items():
        into = tmp_path / form
        for force in ([], ["--force"]):
            assert main(["export", str(theirs), "--into", str(into), "--format", form, *flags.split(), *force]) == 0
        assert len(list(into.glob("*.safetensors"))) > 1
    assert (tmp_path / "titanlab" / "conf" / "model" / "mine.yaml").is_file()


@pytest.mark.full
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


@pytest.fixture
def trains(tmp_path, monkeypatch):
    """A run that saves step 6 and removes step 4 while a part of step 4 is read."""
    recipe, run = saved.run_of(tmp_path / "runs")
    for step in (2, 4):
        saved.save(run, recipe.model, step=step, seed=step)

    def goes_on_during(owner, name):
        real = getattr(owner, name)

        def read(*given, **named):
            if step_folder(run.checkpoints, 4).exists():
                saved.save(run, recipe.model, step=6, seed=6)
                assert remove(step_folder(run.checkpoints, 4)) is None
            return real(*given, **named)

        monkeypatch.setattr(owner, name, read)
        return run

    return goes_on_during


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("part", ["index", "tensors"])
@pytest.mark.parametrize("form", ["hf", "titanlab", "dcp", "dcp --names torchtitan"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_replaced_by_the_next(tmp_path, trains, capsys, part, form):
    """It was "damaged: its file index.json is missing"."""
    owner, name = (reader, "read_index") if part == "index" else (loading, "read_pieces")
    run = trains(owner, name)
    assert main(["export", str(run.path), "--into", str(tmp_path / "out"), "--format", *form.split()]) == 0
    line = "step-00000004 was removed while it was read (checkpoint.keep of its run): the next one is read"
    assert capsys.readouterr().err == f"warning: {line}\n"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000002", "step-00000006"]
    if form == "hf":
        # The weights of step 6.
        with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
            norm = dict(saved.module(saved.run_of(tmp_path / "other")[0].model, seed=6).named_parameters())
            assert torch.equal(file.get_tensor("model.norm.weight"), norm["norm.weight"])


def test_a_named_checkpoint_that_its_run_removes_meanwhile_is_one_line(tmp_path, trains, capsys):
    run = trains(reader, "read_index")
    assert main(["export", str(run.path), "--step", "4", "--into", str(tmp_path / "out")]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: step-00000004 was removed while it was read")
    assert error == "error: --step=4: the run has no whole checkpoint of this step; it has 2, 6"
    assert not (tmp_path / "out").exists()
