"""Checkpoints of the older format from strangers: nothing in one is executed; what is no checkpoint is one line."""

import io
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer, models, pre_tokenizers

from tests import older_format, tiny
from titanlab.checkpoint.folders import latest
from titanlab.checkpoint.older import metadata
from titanlab.checkpoint.older.inert_pickle import UnreadablePickle, read_inert
from titanlab.checkpoint.older.metadata import METADATA, read_saved
from titanlab.checkpoint.older.numpy_state import read_numpy_state
from titanlab.checkpoint.store import restore_generators
from titanlab.cli import main
from titanlab.errors import ConfigError


def resumed(made, run):
    try:
        tiny.as_rank(made, run)
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def trained_run(pool, tmp_path_factory):
    """A run of two steps that has saved one checkpoint."""
    made = tiny.recipe(tmp_path_factory.mktemp("saved"), steps=2)
    run = tiny.begin(made)
    pool.run(1, older_format.trained, made, run)
    return made, run


@pytest.fixture
def copied(trained_run, tmp_path):
    """A copy of the run that a test may spoil, whose recipe has one more step to do."""
    made, run = trained_run
    path = tmp_path / "runs" / run.path.parent.name / run.path.name
    shutil.copytree(run.path, path)
    (path / "result.json").unlink(missing_ok=True)
    # Whoever forges a file forges its size in position.json too.
    position = latest(path / "checkpoints") / "position.json"
    position.write_text(json.dumps({**json.loads(position.read_text()), "files": {}}))
    return tiny.changed(made, steps=3), type(run)(path)


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
            metadata._state(read_inert(program, metadata._NAMES), most_chunks=100)
        assert not ran.exists(), name
    # Each of them that torch's own reader can load does run: the programs are what they say.
    with pytest.raises(AttributeError):
        (tmp_path / METADATA).write_bytes(programs(ran)["reduce"])
        dcp.FileSystemReader(tmp_path).read_metadata()
    assert ran.exists()


def test_no_place_of_the_metadata_runs_code(copied, tmp_path):
    checkpoint = latest(copied[1].checkpoints)
    content = (checkpoint / METADATA).read_bytes()
    ran = tmp_path / "ran"
    for _, planted in spoiled(content, Payload(ran)):
        (checkpoint / METADATA).write_bytes(planted)
        with pytest.raises(ConfigError, match=r"asks for posix\.system, which could run code; give a checkpoint"):
            read_saved(checkpoint, "run")
    assert not ran.exists()


@pytest.mark.parametrize("verb", ["resume", "export", "generate", "init_from", "checkpoint.load_from"])
def test_no_verb_runs_the_code_of_a_checkpoint(copied, tmp_path, capsys, verb):
    made, run = copied
    ran = tmp_path / "ran"
    (latest(run.checkpoints) / METADATA).write_bytes(pickle.dumps(Payload(ran)))
    if verb == "generate":
        run.tokenizer.mkdir()
        alphabet = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        Tokenizer(models.BPE(alphabet, [])).save(str(run.tokenizer / "tokenizer.json"))
    train = ["train", "model=debug", "data=synthetic", "cluster=cpu", f"runs={tmp_path / 'new'}", *_shape(made)]
    arguments = {
        "resume": ["resume", str(run.path)],
        "export": ["export", str(run.path), "--into", str(tmp_path / "out")],
        "generate": ["generate", str(run.path)],
        "init_from": [*train, f"init_from={run.path}"],
        "checkpoint.load_from": [*train, f"checkpoint.load_from={run.path}"],
    }[verb]
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1
    assert "posix.system" in shown.err
    assert not ran.exists()
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("entry", ["a weight", "an option of the optimizer", "a generator", "garbage"])
def test_no_entry_of_a_checkpoint_runs_code(pool, copied, tmp_path, entry):
    made, run = copied
    ran = tmp_path / "ran"
    checkpoint = latest(run.checkpoints)
    state = read_saved(checkpoint, "run")
    name = {
        "a weight": next(name for name in state.tensors if name.startswith("model.")),
        "an option of the optimizer": next(iter(state.objects)),
        "a generator": "generators.0.cpu",
        "garbage": next(name for name in state.tensors if name.startswith("model.")),
    }[entry]
    _replaced(checkpoint, name, b"no tensor" * 9 if entry == "garbage" else _saved(Payload(ran)))
    tiny.begin(made, run)
    (said,) = pool.run(1, resumed, made, run)
    assert "a file is damaged, or asks for more than tensors" in said
    assert not ran.exists()


def test_states_of_generators_saved_as_pickles_are_read_and_run_nothing(pool, copied, tmp_path):
    made, run = copied
    checkpoint = latest(run.checkpoints)
    python, numpy = random.Random(5).getstate(), np.random.RandomState(5).get_state()
    found = pickle.loads((checkpoint / METADATA).read_bytes())
    for name, value in (("python", python), ("numpy", numpy)):
        entry = f"generators.0.{name}"
        found.state_dict_metadata[entry] = dcp.metadata.BytesStorageMetadata()
        index = next(index for index in found.storage_data if index.fqn == entry)
        place = found.storage_data.pop(index)
        place.relative_path, place.offset, place.length = f"{name}.distcp", 0, len(_saved(value))
        found.storage_data[dcp.metadata.MetadataIndex(entry)] = place
        (checkpoint / f"{name}.distcp").write_bytes(_saved(value))
    (checkpoint / METADATA).write_bytes(pickle.dumps(found))
    tiny.begin(made, run)
    assert pool.run(1, drawn_after_loading, made, run) == [
        (random.Random(5).random(), np.random.RandomState(5).random_sample())
    ]

    shutil.rmtree(latest(run.checkpoints))
    ran = tmp_path / "ran"
    (checkpoint / "numpy.distcp").write_bytes(_saved(Payload(ran)))
    found.storage_data[dcp.metadata.MetadataIndex("generators.0.numpy")].length = len(_saved(Payload(ran)))
    (checkpoint / METADATA).write_bytes(pickle.dumps(found))
    assert "UnreadablePickle" in pool.run(1, resumed, made, run)[0]
    assert not ran.exists()


class _Draws:
    """Draws once when training begins its first step."""

    drawn = None

    def with_gradients(self, step, model):
        if self.drawn is None:
            self.drawn = (random.random(), np.random.random_sample())  # noqa: NPY002

    def after_step(self, step, totals):
        pass

    def at_end(self, model):
        pass


def drawn_after_loading(made, run):
    observer = _Draws()
    tiny.as_rank(made, run, observer)
    return observer.drawn


def test_a_position_beyond_the_words_is_no_state_of_numpys_generator(copied):
    _, words, _, _, _ = np.random.RandomState(5).get_state()
    assert read_numpy_state(io.BytesIO(_saved(("MT19937", words, 700, 0, 0.0))))[2] == 700
    with pytest.raises(ConfigError, match="holds no state of a generator"):
        restore_generators({"numpy": ("MT19937", words.tolist(), 700, 0, 0.0)}, None, Path("here"), "run")


def _with(content, change):
    found = pickle.loads(content)
    change(found)
    return pickle.dumps(found)


def test_damaged_metadata_is_one_line(copied, monkeypatch):
    checkpoint = latest(copied[1].checkpoints)
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
    monkeypatch.setattr(metadata, "MOST_BYTES", 100)
    with pytest.raises(ConfigError, match=r"bytes, and 100 are the most"):
        read_saved(checkpoint, "run")
    (checkpoint / METADATA).unlink()
    with pytest.raises(ConfigError, match=r"is missing"):
        read_saved(checkpoint, "run")
    os.mkfifo(checkpoint / METADATA)
    with pytest.raises(ConfigError, match=r"is no file"):
        read_saved(checkpoint, "run")


def test_the_metadata_is_read_as_torch_reads_it(copied):
    checkpoint = latest(copied[1].checkpoints)
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
