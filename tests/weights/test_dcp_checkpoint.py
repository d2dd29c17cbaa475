"""Folders of DCP that other tools write and read: `export --format dcp`, `import` and `checkpoint.load_from`."""

import errno
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import tiny
from tests.pool import RankFailure
from titanlab.checkpoint import latest
from titanlab.checkpoint.folders import step_folder
from titanlab.cli import main
from titanlab.distributed import ALONE, joined
from titanlab.prove.parity import trace
from titanlab.recipe import to_mapping
from titanlab.train.weights_folder import open_weights
from titanlab.train.weights_tensors import run_source


def trained(made, run):
    found = trace(made, run, joined(os.environ) or ALONE)
    return found.losses, found.parameters


# One process without a process group is what these tests want.
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@pytest.fixture(scope="module")
def straight(pool, tmp_path_factory):
    """Losses of four steps over two ranks that were never stopped, and the run."""
    made = tiny.recipe(tmp_path_factory.mktemp("straight"), steps=4, every=2, keep=0, shard=2)
    run = tiny.begin(made)
    return pool.run(2, trained, made, run)[0][0], made, run


@alone
def test_an_exported_folder_is_one_of_dcp_that_load_from_reads(pool, tmp_path, straight, capsys):
    losses, made, run = straight
    into = tmp_path / "out"
    assert main(["export", str(run.path), "--into", str(into), "--format", "dcp", "--step", "2"]) == 0
    assert f"checkpoint_id='{into}'" in capsys.readouterr().out
    assert sorted(path.suffix for path in into.iterdir()) == ["", ".distcp", ".json"]
    source = run_source(step_folder(run.checkpoints, 2), made.model, "run")
    entries = dcp.FileSystemReader(into).read_metadata().state_dict_metadata
    for name, shape in made.model.account().parameters.items():
        assert torch.equal(dcp_tensor(into, f"model.{name}", shape), source.read(name, [0] * len(shape), shape))
        assert f"optimizer.state.{name}.exp_avg" in entries
    other = tiny.recipe(tmp_path, name="other", steps=4, load_from=str(into), shard=2)
    after, _ = pool.run(2, trained, other, tiny.begin(other))[0]
    assert after == losses[2:]


@alone
def test_an_export_for_torchtitan_comes_back(tmp_path, straight, capsys):
    """`--names torchtitan` leaves out `model.` before the names of parameters."""
    _, made, run = straight
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["export", str(run.path), "--into", str(out), "--format", "dcp", "--names", "torchtitan"]) == 0
    names = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    assert "tok_embeddings.weight" in names
    assert "optimizer.state.tok_embeddings.weight.exp_avg" in names
    assert not [name for name in names if name.startswith("model.")]
    sizes = [
        f"model.{key}={value}"
        for key, value in to_mapping(made)["model"].items()
        if key in ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size")
    ]
    assert main(["import", str(out), "--model", "debug", *sizes, "--into", str(back), "--name", "mine"]) == 0
    capsys.readouterr()
    saved = run_source(latest(run.checkpoints), made.model, "run")
    source = open_weights(back, "init_from")
    for name, shape in made.model.account().parameters.items():
        box = [0] * len(shape), shape
        assert torch.equal(source.read(name, *box), saved.read(name, *box))


def dcp_tensor(folder, name, shape):
    """An entry, as another tool would load it."""
    state = {name: torch.empty(shape)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state[name]


def test_what_cannot_be_exported_so_is_one_line(tmp_path, straight, capsys):
    _, _, run = straight
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    for more, rule in [
        (["--into", str(tmp_path / "full")], "is not an empty folder"),
        (["--into", str(tmp_path / "new"), "--dtype", "bfloat16"], "a checkpoint keeps its dtypes"),
        (["--into", str(tmp_path / "new"), "--step", "3"], "no whole checkpoint of this step"),
    ]:
        assert main(["export", str(run.path), "--format", "dcp", *more]) == 2
        said = capsys.readouterr().err
        assert rule in said
        assert said.count("\n") == 1


@alone
@pytest.mark.parametrize("fault", ["damage", "a full disk"])
def test_an_export_that_fails_is_one_line_and_leaves_nothing(tmp_path, straight, capsys, monkeypatch, fault):
    _, _, run = straight
    into, path = tmp_path / "out", shutil.copytree(run.path, tmp_path / "runs" / "single" / run.path.name)
    if fault == "damage":
        shard = latest(path / "checkpoints") / "rank-00000.safetensors"
        shard.write_bytes(bytes(64) + shard.read_bytes()[64:])
    else:
        monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full_disk)
    assert main(["export", str(path), "--into", str(into), "--format", "dcp"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert ("is damaged: its file rank-00000.safetensors" if fault == "damage" else "No space left on device") in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["runs"]


def full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@alone
def test_a_plain_folder_of_another_tool_is_refused_in_a_line(pool, tmp_path):
    (tmp_path / "plain").mkdir()
    dcp.save({"model": {"x": torch.ones(2)}}, checkpoint_id=tmp_path / "plain", no_dist=True)
    other = tiny.recipe(tmp_path, steps=4, load_from=str(tmp_path / "plain"))
    with pytest.raises(RankFailure, match=r"load_from=.*: is damaged: its file position.json is missing; give another"):
        pool.run(1, trained, other, tiny.begin(other))
