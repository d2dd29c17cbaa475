"""Folders of DCP from strangers: nothing in one is executed; what is no checkpoint is one line."""

import io
import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import tiny
from titanlab.checkpoint import METADATA, latest
from titanlab.cli import main
from titanlab.errors import ConfigError
from titanlab.train import dcp_folder, write_dcp
from titanlab.train.dcp_folder import UnreadablePickle, read_inert, read_saved


def started(made, run):
    try:
        tiny.as_rank(made, run)
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def exported(pool, tmp_path_factory):
    """The recipe of a run of two steps, and a folder of DCP with its checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    made = tiny.recipe(folder, steps=2)
    run = tiny.begin(made)
    pool.run(1, started, made, run)
    write_dcp(latest(run.checkpoints), folder / "dcp", "run")
    return made, folder / "dcp"


@pytest.fixture
def copied(exported, tmp_path):
    """A recipe that starts from a copy of the folder, which a test may spoil."""
    made, folder = exported
    copy = shutil.copytree(folder, tmp_path / "dcp")
    # Whoever forges a file forges its size in position.json too.
    position = json.loads((copy / "position.json").read_text())
    (copy / "position.json").write_text(json.dumps({**position, "files": {}}))
    return tiny.changed(made, runs=str(tmp_path / "runs"), steps=3, load_from=str(copy)), copy


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


def spoiled(content, payload):
    """A real metadata with a payload at each place where an object may stand."""
    for place in ("whole", "state_dict_metadata", "storage_data", "planner_data", "storage_meta", "version"):
        found = pickle.loads(content)
        if place == "whole":
            yield place, pickle.dumps(payload)
            continue
        value = getattr(found, place)
        if isinstance(value, dict):
            value[next(iter(value))] = payload
        else:
            setattr(found, place, payload)
        yield place, pickle.dumps(found)


def test_no_opcode_runs_code(tmp_path):
    ran = tmp_path / "ran"
    for name, program in programs(ran).items():
        with pytest.raises(UnreadablePickle):
            dcp_folder._state(read_inert(program, dcp_folder._NAMES), most_chunks=100)
        assert not ran.exists(), name
    # Each of them that torch's own reader can load does run: the programs are what they say.
    with pytest.raises(AttributeError):
        (tmp_path / METADATA).write_bytes(programs(ran)["reduce"])
        dcp.FileSystemReader(tmp_path).read_metadata()
    assert ran.exists()


def test_no_place_of_the_metadata_runs_code(copied, tmp_path):
    _, checkpoint = copied
    content = (checkpoint / METADATA).read_bytes()
    ran = tmp_path / "ran"
    for _, planted in spoiled(content, Payload(ran)):
        (checkpoint / METADATA).write_bytes(planted)
        with pytest.raises(ConfigError, match=r"asks for posix\.system, which could run code; give a checkpoint"):
            read_saved(checkpoint, "run")
    assert not ran.exists()


@pytest.mark.parametrize("key", ["init_from", "checkpoint.load_from"])
def test_no_run_starts_with_the_code_of_a_folder(copied, tmp_path, capsys, key):
    made, checkpoint = copied
    ran = tmp_path / "ran"
    (checkpoint / METADATA).write_bytes(pickle.dumps(Payload(ran)))
    train = ["train", "model=debug", "data=synthetic", "cluster=cpu", f"runs={tmp_path / 'new'}", *_shape(made)]
    assert main([*train, f"{key}={checkpoint}"]) == 2
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1
    assert "posix.system" in shown.err
    assert not ran.exists()
    assert not (tmp_path / "new").exists()


def _shape(made):
    model = made.model
    keys = ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size")
    return [*(f"model.{key}={getattr(model, key)}" for key in keys), f"data.vocab_size={model.vocab_size}"]


def _replaced(checkpoint, name, content):
    """Put other bytes in the place of one saved entry; returns what the metadata says now."""
    found = pickle.loads((checkpoint / METADATA).read_bytes())
    index = next(index for index in found.storage_data if index.fqn == name)
    (checkpoint / "planted.distcp").write_bytes(content)
    found.storage_data[index].relative_path = "planted.distcp"
    found.storage_data[index].offset, found.storage_data[index].length = 0, len(content)
    (checkpoint / METADATA).write_bytes(pickle.dumps(found))
    return found


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("content", ["code", "garbage"])
def test_no_entry_of_a_folder_runs_code(pool, copied, tmp_path, content):
    made, checkpoint = copied
    ran = tmp_path / "ran"
    name = next(name for name in read_saved(checkpoint, "run").tensors if name.startswith("model."))
    _replaced(checkpoint, name, b"no tensor" * 9 if content == "garbage" else _saved(Payload(ran)))
    (said,) = pool.run(1, started, made, tiny.begin(made))
    assert "a file is damaged, or asks for more than tensors" in said
    assert not ran.exists()


def _with(content, change):
    found = pickle.loads(content)
    change(found)
    return pickle.dumps(found)


def test_damaged_metadata_is_one_line(copied, monkeypatch):
    _, checkpoint = copied
    content = (checkpoint / METADATA).read_bytes()

    def out_of_the_folder(found):
        next(iter(found.storage_data.values())).relative_path = "../../../etc/passwd"

    def without_a_size(found):
        next(each for each in found.state_dict_metadata.values() if hasattr(each, "size")).size = None

    def negative(found):
        next(iter(found.storage_data.values())).offset = -1

    def shared(found):
        tensors = [each for each in found.state_dict_metadata.values() if hasattr(each, "size") and len(each.size)]
        tensors[0].chunks = tensors[0].chunks * 2000
        for number in range(2000):
            found.state_dict_metadata[f"more.{number}"] = tensors[0]

    damaged = {
        "empty": b"",
        "cut": content[: len(content) // 2],
        "text": b"hello",
        "other": pickle.dumps({"a": 1}),
        "deep": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        "out of the folder": _with(content, out_of_the_folder),
        "without a size": _with(content, without_a_size),
        "negative": _with(content, negative),
        "one list that all share": _with(content, shared),
    }
    for planted in damaged.values():
        (checkpoint / METADATA).write_bytes(planted)
        with pytest.raises(ConfigError, match=r"its \.metadata is damaged \("):
            read_saved(checkpoint, "run")
    (checkpoint / METADATA).write_bytes(content)
    assert read_saved(checkpoint, "run").tensors
    monkeypatch.setattr(dcp_folder, "MOST_BYTES", 100)
    with pytest.raises(ConfigError, match=r"bytes, and 100 are the most"):
        read_saved(checkpoint, "run")
    (checkpoint / METADATA).unlink()
    with pytest.raises(ConfigError, match=r"is missing"):
        read_saved(checkpoint, "run")
    os.mkfifo(checkpoint / METADATA)
    with pytest.raises(ConfigError, match=r"is no file"):
        read_saved(checkpoint, "run")


def test_the_metadata_is_read_as_torch_reads_it(copied):
    _, checkpoint = copied
    theirs = dcp.FileSystemReader(checkpoint).read_metadata()
    ours = read_saved(checkpoint, "run")
    assert {*ours.tensors, *ours.objects} == set(theirs.state_dict_metadata)
    for name, tensor in ours.tensors.items():
        there = theirs.state_dict_metadata[name]
        assert (getattr(torch, tensor.dtype), tensor.size) == (there.properties.dtype, tuple(there.size))
        assert tensor.boxes == tuple((tuple(each.offsets), tuple(each.sizes)) for each in there.chunks)
    places = {dcp.metadata.MetadataIndex(*index): place for index, place in ours.places.items()}
    assert places.keys() == theirs.storage_data.keys()
    for index, place in theirs.storage_data.items():
        assert (place.relative_path, place.offset, place.length) == (
            places[index].relative_path,
            places[index].offset,
            places[index].length,
        )
