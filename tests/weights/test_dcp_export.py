"""Checkpoints written for other tools: torch reads every entry, and a write that fails says why."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.one_process import saved, trained
from titanlab.checkpoint import DamagedCheckpoint
from titanlab.train import write_dcp
from titanlab.train.dcp_folder import DcpContents, contents_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def names(folder):
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def read(folder, name, shape):
    state = {name: torch.zeros(shape)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state[name]


STATES = [
    f"optimizer.state.{name}.{state}" for name in ("weight", "bias") for state in ("step", "exp_avg", "exp_avg_sq")
]


def test_torch_reads_what_was_written(tmp_path):
    made = trained()
    checkpoint = saved(tmp_path / "run", 5, made=made)
    write_dcp(checkpoint, tmp_path / "out", "run")
    assert names(tmp_path / "out") == {"model.weight", "model.bias", *STATES}
    assert torch.equal(read(tmp_path / "out", "model.weight", (2, 3)), made[0].weight)
    average = made[1].state[made[0].bias]["exp_avg"]
    assert torch.equal(read(tmp_path / "out", "optimizer.state.bias.exp_avg", (2,)), average)


def test_load_from_reads_the_folder(tmp_path):
    write_dcp(saved(tmp_path / "run", 5, recipe="ab" * 32), tmp_path / "out", "run")
    contents = contents_of(tmp_path / "out", "run")
    assert isinstance(contents, DcpContents)
    assert contents.names == {"model.weight", "model.bias", *STATES}
    assert (contents.saved.position.step, contents.saved.recipe) == (5, "ab" * 32)
    # Other layouts cannot use states of generators.
    assert contents.saved.generators == {}
    files = json.loads((tmp_path / "out" / "position.json").read_text())["files"]
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir() if path.name != "position.json"}
    assert files == written


@pytest.mark.parametrize("prefix", ["", "module."])
def test_another_prefix_is_another_tool_s_and_has_no_position(tmp_path, prefix):
    made = trained()
    write_dcp(saved(tmp_path / "run", made=made), tmp_path / "out", "run", prefix=prefix)
    assert names(tmp_path / "out") == {f"{prefix}weight", f"{prefix}bias", *STATES}
    assert not (tmp_path / "out" / "position.json").exists()
    assert torch.equal(read(tmp_path / "out", f"{prefix}weight", (2, 3)), made[0].weight)


def test_damage_of_the_checkpoint_is_said_as_such(tmp_path):
    checkpoint = saved(tmp_path / "run")
    path = checkpoint / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedCheckpoint, match=re.escape("rank-00000.safetensors has other bytes than were saved")):
        write_dcp(checkpoint, tmp_path / "out", "run")


def test_a_disk_that_is_full_is_that_error(tmp_path, monkeypatch):
    checkpoint = saved(tmp_path / "run")

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_dcp(checkpoint, tmp_path / "out", "run")
    assert caught.value.errno == 28
