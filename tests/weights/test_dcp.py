"""Folders of torch.distributed.checkpoint: written for others, read from others; no code in one is ever executed."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tests import tiny
from tests.checkpoint.storage import write
from tests.pool import RankFailure
from tests.refusals import refusal
from titanlab.checkpoint import (
    ITEM_BYTES,
    METADATA,
    DamagedCheckpoint,
    SavedPosition,
    latest,
    load_state,
    read_contents,
)
from titanlab.checkpoint.folders import step_folder
from titanlab.cli import main
from titanlab.distributed import ALONE, joined
from titanlab.errors import ConfigError
from titanlab.prove.parity import trace
from titanlab.recipe import to_mapping
from titanlab.techniques.model.llama_schema import Llama
from titanlab.train import dcp as module
from titanlab.train.dcp import dcp_contents, dcp_source, source_of
from titanlab.train.starting_weights import contents_of
from titanlab.train.weights import TensorEntry, open_weights

# One process without a process group is what these tests want.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def trained(made, run):
    found = trace(made, run, joined(os.environ) or ALONE)
    return found.losses, found.parameters


@pytest.fixture(scope="module")
def straight(pool, tmp_path_factory):
    """Losses of four steps over two ranks that were never stopped, the recipe, the run, and step 2 as a folder of DCP."""
    folder = tmp_path_factory.mktemp("straight")
    made = tiny.recipe(folder, steps=4, every=2, keep=0, shard=2)
    run = tiny.begin(made)
    losses = pool.run(2, trained, made, run)[0][0]
    assert main(["export", str(run.path), "--into", str(folder / "dcp"), "--format", "dcp", "--step", "2"]) == 0
    return losses, made, run, folder / "dcp"


def same(source, other, model):
    """Whether two sources have the same parameters."""
    boxes = {name: ([0] * len(shape), shape) for name, shape in model.account().parameters.items()}
    return all(torch.equal(source.read(name, *box), other.read(name, *box)) for name, box in boxes.items())


def test_an_exported_folder_is_one_of_dcp_that_load_from_reads(pool, tmp_path, straight):
    losses, made, run, folder = straight
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".distcp", ".json"]
    theirs = dcp.FileSystemReader(folder).read_metadata()
    source = source_of(read_contents(step_folder(run.checkpoints, 2), "run"), made.model)
    for name, shape in made.model.account().parameters.items():
        # An entry, as another tool would load it.
        state = {f"model.{name}": torch.empty(shape)}
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        assert torch.equal(state[f"model.{name}"], source.read(name, [0] * len(shape), shape))
        assert f"optimizer.state.{name}.exp_avg" in theirs.state_dict_metadata
    # It is read as torch reads it.
    contents = contents_of(folder, "run")
    assert contents.names == theirs.state_dict_metadata.keys()
    for name, entry in theirs.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            found = contents.tensors[name]
            assert (found.shape, found.dtype) == (entry.size, str(entry.properties.dtype).removeprefix("torch."))
            for chunk, row in zip(entry.chunks, found.chunks.tolist(), strict=True):
                place = theirs.storage_data[MetadataIndex(name, chunk.offsets)]
                assert (contents.chunk.paths[row[0]], *row[1:3]) == (place.relative_path, place.offset, place.length)
                assert row[3:] == [*chunk.offsets, *chunk.sizes]
    # Other layouts cannot use states of generators.
    assert (contents.saved.position.step, contents.saved.generators) == (2, {})
    written = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "position.json"}
    assert json.loads((folder / "position.json").read_text())["files"] == written
    other = tiny.recipe(tmp_path, name="other", steps=4, load_from=str(folder), shard=2)
    after, _ = pool.run(2, trained, other, tiny.begin(other))[0]
    assert after == losses[2:]


def test_an_export_for_torchtitan_comes_back(tmp_path, straight, capsys):
    """`--names torchtitan` leaves out `model.` before the names of parameters."""
    _, made, run, _ = straight
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["export", str(run.path), "--into", str(out), "--format", "dcp", "--names", "torchtitan"]) == 0
    assert f"checkpoint_id='{out}'" in capsys.readouterr().out
    names = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
    assert "tok_embeddings.weight" in names
    assert "optimizer.state.tok_embeddings.weight.exp_avg" in names
    assert not [name for name in names if name.startswith("model.")]
    assert not (out / "position.json").exists()
    keys = ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size")
    sizes = [f"model.{key}={value}" for key, value in to_mapping(made)["model"].items() if key in keys]
    assert main(["import", str(out), "--model", "debug", *sizes, "--into", str(back), "--name", "mine"]) == 0
    saved = source_of(read_contents(latest(run.checkpoints), "run"), made.model)
    assert same(open_weights(back, "init_from"), saved, made.model)


def test_what_cannot_be_exported_so_is_one_line(tmp_path, straight, capsys):
    _, _, run, _ = straight
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


@pytest.mark.parametrize("fault", ["damage", "a full disk"])
def test_an_export_that_fails_is_one_line_and_leaves_nothing(tmp_path, straight, capsys, monkeypatch, fault):
    _, _, run, _ = straight
    path = shutil.copytree(run.path, tmp_path / "runs" / "single" / run.path.name)
    if fault == "damage":
        shard = latest(path / "checkpoints") / "rank-00000.safetensors"
        shard.write_bytes(bytes(64) + shard.read_bytes()[64:])
    else:
        monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fails(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert main(["export", str(path), "--into", str(tmp_path / "out"), "--format", "dcp"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert ("is damaged: its file rank-00000.safetensors" if fault == "damage" else "No space left on device") in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["runs"]


def fails(error):
    def call(*given):
        raise error

    return call


def test_a_plain_folder_of_another_tool_is_refused_in_a_line(pool, tmp_path):
    (tmp_path / "plain").mkdir()
    dcp.save({"model": {"x": torch.ones(2)}}, checkpoint_id=tmp_path / "plain", no_dist=True)
    other = tiny.recipe(tmp_path, steps=4, load_from=str(tmp_path / "plain"))
    with pytest.raises(RankFailure, match=r"load_from=.*: is damaged: its file position.json is missing; give another"):
        pool.run(1, trained, other, tiny.begin(other))


MODEL = Llama(dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=24, vocab_size=32)


def weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in MODEL.account().parameters.items()}


def checkpoint(folder, tensors):
    """A checkpoint of titanlab: its source."""
    write({f"model.{name}": tensor for name, tensor in tensors.items()} | {"optimizer.step": 1}, folder)
    return source_of(read_contents(folder, "run"), MODEL)


def foreign(folder, tensors, prefix=""):
    """A folder of another tool: its source."""
    state = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return dcp_source(folder, MODEL, "k")


@pytest.mark.parametrize("make", [checkpoint, foreign, lambda *given: foreign(*given, prefix="model.")])
def test_any_box_of_each_parameter_is_read_and_a_pickle_once(tmp_path, monkeypatch, make):
    tensors = {name: tensor.bfloat16() if "norm" in name else tensor for name, tensor in weights().items()}
    source = make(tmp_path / "c", tensors)
    assert (source.model, source.biases) == (MODEL, {})
    assert list(source.entries.items()) == [
        (name, TensorEntry(dtype="BF16" if "norm" in name else "F32", shape=tuple(tensors[name].shape)))
        for name in MODEL.account().parameters
    ]
    reads, real = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *given, **more: reads.append(given) or real(*given, **more))
    for name, tensor in tensors.items():
        assert torch.equal(source.read(name, [0] * tensor.ndim, tensor.shape), tensor)
        if tensor.ndim == 2:
            assert torch.equal(source.read(name, [1, 3], [4, 2]), tensor[1:5, 3:5])
            assert source.read(name, [0, 0], [0, 2]).shape == (0, 2)
    assert len(reads) == (0 if make is checkpoint else len(tensors))


@pytest.mark.parametrize("make", [checkpoint, foreign])
@pytest.mark.parametrize("change", ["missing", "int64"])
def test_a_parameter_that_is_not_a_plain_tensor_is_named(tmp_path, make, change):
    tensors = weights()
    name = list(tensors)[1]
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name].to(getattr(torch, change))
    told = refusal(make, tmp_path / "c", tensors)
    key = "run" if make is checkpoint else "k"
    said = f"has no plain tensor {name}; give a checkpoint of the same model"
    assert told == f"{key}={tmp_path / 'c'}: {said}"


def test_a_folder_of_another_model_says_what_differs(tmp_path):
    tensors, first = weights(), next(iter(weights()))
    with pytest.raises(ConfigError) as caught:
        foreign(tmp_path / "c", {name: torch.ones(2) for name in ("d", "c", "b", "a")})
    assert str(caught.value) == (
        f"k={tmp_path / 'c'}: has no parameter of the model, such as {first} or model.{first}; it has a, b, c; "
        "give the --model that was saved"
    )
    with pytest.raises(ConfigError, match="it has nothing; give the --model"):
        foreign(tmp_path / "d", {})
    with pytest.raises(ConfigError) as caught:
        foreign(tmp_path / "e", {**tensors, first: torch.zeros(5, 6)})
    said = f"{first} is [5, 6] there and {list(tensors[first].shape)} in the model; give the --model that was saved"
    assert str(caught.value) == f"k={tmp_path / 'e'}: {said}"


def tensor(size=(4, 2), *boxes, dtype=torch.float32):
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(size),
        chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
    )


NOWHERE = SavedPosition(step=0, parameters={})
HALVES = [((0, 0), (2, 2)), ((2, 0), (2, 2))]


def of(entries=None, places=None, **more):
    entries = {"x": tensor((4, 2), *HALVES), "n": BytesStorageMetadata()} if entries is None else entries
    if places is None:
        chunks = {
            MetadataIndex(name, chunk.offsets): None
            for name, entry in entries.items()
            for chunk in getattr(entry, "chunks", ())
        }
        places = dict.fromkeys([*chunks, MetadataIndex("n")], _StorageInfo("__0_0.distcp", 5, 16))
    return Metadata(state_dict_metadata=entries, storage_data=places, **more)


def read(folder, found):
    (folder / METADATA).write_bytes(found if isinstance(found, bytes) else pickle.dumps(found))
    return dcp_contents(folder, "run", NOWHERE)


def refused(folder, found):
    with pytest.raises(DamagedCheckpoint) as caught:
        read(folder, found)
    before = f"run={folder}: its .metadata "
    after = "; give a checkpoint that titanlab has saved, from a source that you trust"
    assert str(caught.value).startswith(before)
    assert str(caught.value).endswith(after)
    return str(caught.value).removeprefix(before).removesuffix(after)


def test_all_that_torch_writes_is_read(tmp_path):
    meta = StorageMeta(checkpoint_id=PosixPath("/where/it/was"), save_id="a", load_id=None)
    entries = {name: tensor((), ((), ()), dtype=getattr(torch, name)) for name in ITEM_BYTES}
    saved = read(tmp_path, of({**entries, "n": BytesStorageMetadata()}, planner_data={"x": ("x",)}, storage_meta=meta))
    assert {name: entry.dtype for name, entry in saved.tensors.items()} == {name: name for name in ITEM_BYTES}
    assert read(tmp_path, of({}, {})).names == set()


def entry(value):
    return lambda: of({"x": value}, {})


def place(*given, **more):
    return lambda: of(None, {MetadataIndex("x"): _StorageInfo(*given, **more)})


def properties(value):
    found = tensor()
    found.properties = value
    return found


A_NAME = "it lacks the name of a file beside it"
BROKEN = {
    "a list": (list, "Expected `object`, got `array`"),
    "not a mapping": (lambda: of([], {}), "Expected `object`, got `array`"),
    "a size of true": (entry(TensorStorageMetadata(TensorProperties(), (True,), [])), "Expected `int`, got `bool`"),
    "a chunk of one dim": (entry(tensor((4, 2), ((0,), (2,)))), "a chunk lies outside of 'x'"),
    "a chunk outside": (entry(tensor((4,), ((3,), (2,)))), "a chunk lies outside of 'x'"),
    "properties of text": (entry(properties("float32")), "AttributeError"),
    "an index of text": (lambda: of(None, {"x": _StorageInfo("a", 0, 1)}), "Expected `object`, got `str`"),
    "a file outside": (place("../a", 0, 1), A_NAME),
    "the folder": (place(".", 0, 1), A_NAME),
    "the folder above": (place("..", 0, 1), A_NAME),
    "no name": (place("", 0, 1), A_NAME),
    "a null": (place("a\0", 0, 1), A_NAME),
    "a negative offset": (place("a", -1, 1), "Expected `int` >= 0"),
    "an offset of 2**63": (place("a", 2**63, 1), "Expected `int` <="),
    "compressed bytes": (place("a", 0, 1, transform_descriptors=["zstd"]), "Expected `null`, got `array`"),
    "a version of a number": (lambda: of(version=3), "Expected `str | null`, got `int`"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_value_that_torch_never_writes_is_named(tmp_path, name):
    make, wanted = BROKEN[name]
    assert refused(tmp_path, make()).startswith(f"is damaged ({wanted}")


def test_a_list_of_chunks_that_many_share_is_refused(tmp_path):
    """A small file could take hours to read."""
    shared = tensor((4, 2), *HALVES * 500)
    few, many = (of({f"x{number}": shared for number in range(count)}) for count in (5, 500))
    assert len(read(tmp_path, few).tensors) == 5
    assert refused(tmp_path, many) == "is damaged (it has more chunks than bytes)"


def test_what_is_not_metadata_is_one_line(tmp_path, monkeypatch):
    content = pickle.dumps(of())
    deep = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
    for damaged in (b"", content[: len(content) // 2], b"hello", b"\x80\xff.", pickle.dumps({"a": 1}), deep):
        assert refused(tmp_path, damaged).startswith("is damaged (")
    monkeypatch.setattr(module, "MOST_BYTES", len(content))
    read(tmp_path, content)
    monkeypatch.setattr(module, "MOST_BYTES", len(content) - 1)
    assert refused(tmp_path, content) == f"has {len(content)} bytes, and {len(content) - 1} are the most"
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_bytes", fails(PermissionError(13, "Permission denied")))
    with pytest.raises(DamagedCheckpoint, match=r"its \.metadata cannot be read \(Permission denied\);"):
        dcp_contents(tmp_path, "run", NOWHERE)
    (tmp_path / METADATA).unlink()
    with pytest.raises(DamagedCheckpoint, match=r"its \.metadata is missing;"):
        dcp_contents(tmp_path, "run", NOWHERE)
    os.mkfifo(tmp_path / METADATA)
    with pytest.raises(DamagedCheckpoint, match=r"its \.metadata is not a file;"):
        dcp_contents(tmp_path, "run", NOWHERE)


class Payload:
    """Unpickled, it touches a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def programs(path):
    """Pickles by hand that call os.system or the like when they are loaded, each in its own way."""
    command = f"touch {path}".encode()
    short = b"\x8c" + bytes([len(command)]) + command
    name = b"\x8c\x05posix\x8c\x06system\x93"
    return {
        "reduce": b"\x80\x04" + name + short + b"\x85R.",
        "global": b"cposix\nsystem\n(S'" + command + b"'\ntR.",
        "inst": b"(S'" + command + b"'\niposix\nsystem\n.",
        "obj": b"(cposix\nsystem\nS'" + command + b"'\no.",
        "newobj": b"\x80\x04\x8c\x0asubprocess\x8c\x05Popen\x93" + short + b"\x85\x81.",
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x0eos.path.system\x93" + short + b"\x85R.",
        "dotted module": b"\x80\x04\x8c\x0etorch.os.posix\x8c\x06system\x93" + short + b"\x85R.",
        "through an allowed name": b"\x80\x04\x8c\x05torch\x8c\x0bSize.__new__\x93" + short + b"\x85R.",
        "getattr": b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x06system\x86R" + short + b"\x85R.",
        "memo": b"\x80\x04" + name + b"\x94" + short + b"\x94h\x00h\x01\x85R.",
        "build": b"\x80\x04\x8c\x05torch\x8c\x04Size\x93)\x81}\x8c\x0c__setstate__" + name + b"sb}b.",
        "build of a class": b"\x80\x04\x8c\x05torch\x8c\x04Size\x93N}\x8c\x0c__setstate__K\x01s\x86b.",
        "extension": b"\x80\x04\x82\x01" + short + b"\x85R.",
        "persistent": b"\x80\x04" + short + b"Q.",
    }


def test_no_opcode_runs_code(tmp_path):
    ran = tmp_path / "ran"
    for name, program in programs(ran).items():
        refused(tmp_path, program)
        assert not ran.exists(), name
    # Each of them that torch's own reader can load does run: the programs are what they say.
    (tmp_path / METADATA).write_bytes(programs(ran)["reduce"])
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(tmp_path).read_metadata()
    assert ran.exists()


def test_one_reading_does_not_change_the_next(tmp_path):
    """A program sets an attribute of a class that it has asked for."""
    of_class = b"\x80\x04ctorch\nfloat32\nN}\x8c\x04nameK\x01s\x86b."
    refused(tmp_path, of_class)
    assert read(tmp_path, of()).tensors["x"].dtype == "float32"


@pytest.mark.parametrize("key", ["init_from", "checkpoint.load_from"])
def test_no_run_starts_with_the_code_of_a_folder(straight, tmp_path, capsys, key):
    _, made, _, folder = straight
    copy, ran = shutil.copytree(folder, tmp_path / "dcp"), tmp_path / "ran"
    # Whoever forges a file forges its size in position.json too.
    position = json.loads((copy / "position.json").read_text())
    (copy / "position.json").write_text(json.dumps({**position, "files": {}}))
    (copy / METADATA).write_bytes(pickle.dumps(Payload(ran)))
    keys = ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size")
    shape = [f"model.{name}={getattr(made.model, name)}" for name in keys]
    train = ["train", "model=debug", "data=synthetic", "cluster=cpu", f"runs={tmp_path / 'new'}", *shape]
    assert main([*train, f"data.vocab_size={made.model.vocab_size}", f"{key}={copy}"]) == 2
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1
    assert "posix.system" in shown.err
    assert not ran.exists()
    assert not (tmp_path / "new").exists()


def saved(folder, state):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return dcp_contents(folder, "run", NOWHERE)


def unreadable(contents, state):
    with pytest.raises(DamagedCheckpoint) as caught:
        load_state(state, contents)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("content", ["code", "garbage"])
def test_no_entry_of_a_folder_runs_code(tmp_path, content):
    ran, file = tmp_path / "ran", io.BytesIO()
    torch.save(Payload(ran), file)
    folder = tmp_path / "c"
    saved(folder, {"x": torch.ones(3)})
    planted = b"not a tensor" * 9 if content == "garbage" else file.getvalue()
    found = pickle.loads((folder / METADATA).read_bytes())
    (index,) = found.storage_data
    (folder / "planted.distcp").write_bytes(planted)
    found.storage_data[index] = _StorageInfo("planted.distcp", 0, len(planted))
    (folder / METADATA).write_bytes(pickle.dumps(found))
    reader = dcp_contents(folder, "run", NOWHERE)
    assert "a file is damaged, or asks for more than tensors" in unreadable(reader, {"x": torch.zeros(3)})
    assert not ran.exists()


def test_code_in_place_of_a_value_does_not_run(tmp_path):
    reader = saved(tmp_path / "c", {"n": Payload(tmp_path / "ran")})
    assert "asks for more than tensors" in unreadable(reader, {"n": 0})
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_is_named_and_an_error_of_the_machine_is_no_damage(tmp_path, monkeypatch):
    reader = saved(tmp_path, {"x": torch.ones(3)})
    for path in tmp_path.glob("*.distcp"):
        path.unlink()
    assert "cannot be read (it has no file __0_0.distcp)" in unreadable(reader, {"x": torch.zeros(3)})
    for error in (OSError(5, "Input/output error"), MemoryError("x"), torch.OutOfMemoryError("x")):
        monkeypatch.setattr(Path, "open", fails(error))
        with pytest.raises(type(error)):
            load_state({"x": torch.zeros(3)}, reader)
