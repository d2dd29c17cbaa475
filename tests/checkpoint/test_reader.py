"""Reading a checkpoint, or a folder of DCP, into a state, and what a state that does not fit is told."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.one_process import saved, trained
from tests.checkpoint.storage import write
from titanlab.checkpoint import DamagedCheckpoint, read_contents, read_into
from titanlab.checkpoint import reader as shard_reader
from titanlab.checkpoint.reader import JsonPlanner, ShardReader, load_state
from titanlab.errors import ConfigError
from titanlab.train.dcp import DcpPlanner, DcpReader, read_saved

# A run has a process group, also of one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

STATE = {"model": {"x": torch.arange(6.0).view(2, 3)}, "n": {"rates": 0.5, "list": [1, None], "text": "é"}}


def ours(folder, state):
    write(state, folder)
    return reader_of(folder)


def plain(folder, state):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return DcpReader(folder, read_saved(folder, "run"), "run")


def reader_of(checkpoint):
    return read_contents(checkpoint, "run").reader(checkpoint, "run")


def empty():
    return {"model": {"x": torch.zeros(2, 3)}, "n": {"rates": 0.0, "list": [0, 0], "text": ""}}


@pytest.mark.parametrize(("make", "kinds"), [(ours, (ShardReader, JsonPlanner)), (plain, (DcpReader, DcpPlanner))])
def test_each_format_has_its_reader_and_planner(tmp_path, make, kinds):
    reader = make(tmp_path / "c", STATE)
    assert (type(reader), type(reader.planner())) == kinds
    assert (reader.checkpoint, reader.named_by) == (tmp_path / "c", "run")


@pytest.mark.parametrize("make", [ours, plain])
def test_a_state_comes_back(tmp_path, make):
    reader, state = make(tmp_path / "c", STATE), empty()
    load_state(state, reader)
    assert torch.equal(state["model"]["x"], STATE["model"]["x"])
    assert state["n"] == STATE["n"]


@pytest.mark.parametrize("make", [ours, plain])
def test_entries_are_read_by_their_names(tmp_path, make):
    reader = make(tmp_path / "c", STATE)
    state = {"model.x": torch.zeros(2, 3)}
    read_into(state, reader, reader.read_metadata())
    assert torch.equal(state["model.x"], STATE["model"]["x"])


@pytest.mark.parametrize("make", [ours, plain])
@pytest.mark.parametrize("state", [{"model": {"y": torch.zeros(2)}}, {"model": {"x": torch.zeros(3, 2)}}])
def test_a_state_of_another_model_is_one_line(tmp_path, make, state):
    reader = make(tmp_path / "c", STATE)
    with pytest.raises(ConfigError) as caught:
        load_state(state, reader)
    assert not isinstance(caught.value, DamagedCheckpoint)
    assert str(caught.value).startswith(f"run={tmp_path / 'c'}: cannot be read (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "pattern", "said"),
    [(ours, "*.safetensors", "rank-00000.safetensors is missing"), (plain, "*.distcp", "it has no file __0_0.distcp")],
)
def test_a_missing_file_is_damage(tmp_path, make, pattern, said):
    reader = make(tmp_path / "c", STATE)
    for path in (tmp_path / "c").glob(pattern):
        path.unlink()
    with pytest.raises(DamagedCheckpoint, match=said):
        load_state(empty(), reader)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("out of memory")])
def test_an_error_of_the_machine_says_nothing_about_the_checkpoint(tmp_path, monkeypatch, error):
    reader = ours(tmp_path / "c", STATE)

    def fails(*given):
        raise error

    monkeypatch.setattr(shard_reader, "BlockReader", fails)
    with pytest.raises(dcp.CheckpointException) as caught:
        load_state(empty(), reader)
    ((failure, _),) = caught.value.failures.values()
    assert failure is error


def test_a_checkpoint_of_a_model_is_read_entry_by_entry(tmp_path):
    made = trained()
    checkpoint = saved(tmp_path, made=made)
    reader = reader_of(checkpoint)
    average = torch.zeros(2, 3)
    read_into({"optimizer.state.weight.exp_avg": average}, reader, reader.read_metadata())
    assert torch.equal(average, made[1].state[made[0].weight]["exp_avg"])
