"""Crafted files in checkpoints, with checksums that fit: one line for each, and nothing is executed or read outside."""

import base64
import json
import os
import pickle
import shutil
import sys

import pytest

from tests import tiny
from tests.checkpoint.test_damage import loaded
from tests.pool import RankFailure
from titanlab.checkpoint import DamagedCheckpoint, latest, read_contents
from titanlab.checkpoint.blocks import DamagedFile, checksum
from titanlab.checkpoint.folders import INDEX
from titanlab.checkpoint.index import signed
from titanlab.checkpoint.index_reader import read_index
from titanlab.cli import main
from titanlab.errors import ConfigError
from titanlab.records import RunFolder

SHARD = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def trained_run(pool, tmp_path_factory):
    """A run of two steps that has saved one checkpoint."""
    made = tiny.recipe(tmp_path_factory.mktemp("saved"), steps=2)
    run = tiny.begin(made)
    pool.run(1, loaded, made, run)
    (run.path / "result.json").unlink()
    return made, run


@pytest.fixture
def copied(trained_run, tmp_path):
    made, run = trained_run
    return made, RunFolder(shutil.copytree(run.path, tmp_path / "runs" / run.path.parent.name / run.path.name))


@pytest.fixture
def checkpoint(copied):
    return latest(copied[1].checkpoints)


def rewrite(checkpoint, change):
    """Change the content of the index, and sign it again."""
    content = json.loads((checkpoint / INDEX).read_bytes())
    del content["checksum"]
    content = change(content) or content
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (checkpoint / INDEX).write_bytes(signed(text))


def of_tensor(name, value):
    def change(content):
        next(iter(content["tensors"].values()))[name] = value

    return change


def of_chunk(column, value):
    def change(content):
        next(iter(content["tensors"].values()))["chunks"][0][column] = value

    return change


def of_file(name, value):
    def change(content):
        content["files"][0][name] = value

    return change


def of(name, value):
    def change(content):
        content[name] = value

    return change


def without(name):
    def change(content):
        del content[name]

    return change


def overlapping(content):
    first, second, *_ = (each for each in content["tensors"].values() if each["shape"] == [64])
    second["chunks"][0][1] = first["chunks"][0][1] + 4


def repeated_chunk(content):
    tensor = next(iter(content["tensors"].values()))
    tensor["chunks"].append(tensor["chunks"][0])


def hole(content):
    tensor = next(each for each in content["tensors"].values() if each["shape"] == [64])
    tensor["chunks"][0][2:] = [128, 0, 32]


def repeated_file(content):
    content["files"].append(content["files"][0])


def nested(depth):
    return lambda content: b'{"format":1,"tensors":' + b"[" * depth + b"]" * depth + b"}"


CRAFTED = {
    "no mapping": lambda content: b'{"format":1}',
    "a list": lambda content: b"[1,2]",
    "nothing": lambda content: b"{",
    "no UTF-8": lambda content: b'{"\xff":1}',
    "unknown key": of("later", 1),
    "no tensors": without("tensors"),
    "no files": without("files"),
    "no format": without("format"),
    "format as text": of("format", "1"),
    "format true": of("format", True),
    "files as mapping": of("files", {}),
    "objects as list": of("objects", []),
    "tensors as text": of("tensors", "x"),
    "a tensor as text": of("tensors", {"x": "y"}),
    "position as text": of("position", "x"),
    "position of another size": of("position", {"bytes": -1, "checksum": "0" * 16}),
    "position without checksum": of("position", {"bytes": 1, "checksum": None}),
    "unknown dtype": of_tensor("dtype", "posix.system"),
    "dtype as list": of_tensor("dtype", []),
    "shape as text": of_tensor("shape", "64"),
    "negative shape": of_tensor("shape", [-1, 64]),
    "huge shape": of_tensor("shape", [2**61, 2**61]),
    "shape beyond 64 bits": of_tensor("shape", [10**30]),
    "many dims": of_tensor("shape", [1] * 5000),
    "shape true": of_tensor("shape", [True, 64]),
    "shape NaN": of_tensor("shape", [float("nan"), 64]),
    "shape infinite": of_tensor("shape", [float("inf"), 64]),
    "shape 10**5000": lambda content: json.dumps(content).replace('"shape": [', '"shape": [1' + "0" * 5000 + ",", 1).encode(),
    "extra key of a tensor": of_tensor("stride", 1),
    "chunks as mapping": of_tensor("chunks", {}),
    "no chunks": of_tensor("chunks", []),
    "chunk as text": of_tensor("chunks", ["abc"]),
    "short chunk": of_tensor("chunks", [[0, 1]]),
    "chunk of floats": of_chunk(1, 8.0),
    "chunk with true": of_chunk(0, False),
    "chunk beyond 64 bits": of_chunk(1, 2**64),
    "chunk of 2**63 - 1": of_chunk(1, 2**63 - 1),
    "negative start": of_chunk(1, -8),
    "negative file": of_chunk(0, -1),
    "a file that is not listed": of_chunk(0, 1),
    "other bytes": of_chunk(2, 8),
    "negative bytes": of_chunk(2, -8),
    "negative offset": of_chunk(3, -1),
    "an offset outside": of_chunk(3, 2**62),
    "sizes outside": of_chunk(-1, 2**62),
    "start behind the file": of_chunk(1, 2**40),
    "overlapping bytes": overlapping,
    "a chunk twice": repeated_chunk,
    "a hole": hole,
    "a file twice": repeated_file,
    "absolute path": of_file("name", "/etc/passwd"),
    "path out of the folder": of_file("name", "../rank-00000.safetensors"),
    "path into a folder": of_file("name", "a/rank-00000.safetensors"),
    "name with a null": of_file("name", "rank-00000.safetensors\0"),
    "name with a newline": of_file("name", "rank-00000.safetensors\n"),
    "name of the index": of_file("name", INDEX),
    "name as list": of_file("name", ["rank-00000.safetensors"]),
    "file of other size": of_file("bytes", 5),
    "file of huge size": of_file("bytes", 2**61),
    "checksums as list": of_file("checksums", [1]),
    "checksums not base64": of_file("checksums", "%%%%"),
    "checksums beyond ASCII": of_file("checksums", "ü" * 12),
    "too few checksums": of_file("checksums", ""),
    "too many checksums": of_file("checksums", base64.b64encode(bytes(80)).decode()),
    "10 levels": nested(10),
    "100,000 levels": nested(100_000),
    "a name with newlines": of("tensors", {"x\ny\n" * 500: {"dtype": "float32", "shape": [2], "chunks": []}}),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_index_is_one_line(checkpoint, name):
    rewrite(checkpoint, CRAFTED[name])
    with pytest.raises(DamagedCheckpoint) as refused:
        read_contents(checkpoint, "run")
    text = str(refused.value)
    assert text.startswith("run=")
    assert "\n" not in text
    assert len(text) < 1000
    # It is said in words, not by the name of an exception, unless it is no JSON at all.
    if isinstance(refused.value.__cause__, DamagedFile) and "is no JSON" not in text:
        assert "Error" not in text, text


def test_the_crafted_content_itself_is_what_is_refused(checkpoint):
    rewrite(checkpoint, lambda content: None)
    assert read_contents(checkpoint, "run").saved.position.step == 2


def test_a_later_format_is_no_damage(checkpoint):
    rewrite(checkpoint, of("format", 2))
    with pytest.raises(
        ConfigError, match="has the format 2, and this version of titanlab reads 1; use the "
    ) as refused:
        read_contents(checkpoint, "run")
    assert not isinstance(refused.value, DamagedCheckpoint)


def replace_position(checkpoint, content):
    """Put another position.json into a checkpoint, and its checksum into the index."""
    (checkpoint / "position.json").write_bytes(content)
    rewrite(checkpoint, of("position", {"bytes": len(content), "checksum": f"{checksum(content):016x}"}))


POSITIONS = {
    "step": -1,
    "generators": {"0": {"cpu": [1]}},
    "generators of many": {"x": {}},
    "generators of nobody": {"-1": {"cpu": ""}},
    "generators too large": {"0": {"cpu": base64.b64encode(bytes(1 << 17)).decode()}},
    "generators unknown": {"0": {"posix.system": ""}},
    "generators as text": "x",
    "recipe": "x",
    "recipe as number": 3,
    "files": {"../x": 3},
    "tokens": float("nan"),
    "data": [],
}


@pytest.mark.parametrize("name", POSITIONS)
def test_a_crafted_position_is_one_line(checkpoint, name):
    content = json.loads((checkpoint / "position.json").read_bytes())
    content[name.partition(" ")[0]] = POSITIONS[name]
    replace_position(checkpoint, json.dumps(content).encode())
    with pytest.raises(DamagedCheckpoint) as refused:
        read_contents(checkpoint, "run")
    assert "\n" not in str(refused.value)


def test_a_position_that_is_nested_or_no_mapping_is_refused(checkpoint):
    for content in (
        b"[" * 100_000,
        b'{"data":' * 5_000 + b"1" + b"}" * 5_000,
        b"[1]",
        b"3",
    ):
        replace_position(checkpoint, content)
        with pytest.raises(DamagedCheckpoint, match=r"position\.json"):
            read_contents(checkpoint, "run")


@pytest.mark.parametrize(
    "state", [b"", b"no JSON", b"[3, [1, 2], null]", b"\x80\x04]", b"[" * 60_000, b"[3, null, null]"]
)
@pytest.mark.parametrize("generator", ["cpu", "python", "numpy"])
def test_a_state_that_is_none_of_a_generator_is_damage(pool, copied, checkpoint, generator, state):
    made, run = copied
    content = json.loads((checkpoint / "position.json").read_bytes())
    content["generators"]["0"][generator] = base64.b64encode(state).decode()
    replace_position(checkpoint, json.dumps(content).encode())
    made = tiny.changed(made, steps=3)
    if not state:
        assert pool.run(1, loaded, tiny.changed(made, steps=2), tiny.begin(made, run))[0][1] == 2
        return
    with pytest.raises(RankFailure, match=r"DamagedCheckpoint: run=.*holds no state of a generator \(\w+\)"):
        pool.run(1, loaded, made, tiny.begin(made, run))


class Payload:
    """Unpickled, it touches a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", [SHARD, INDEX, "position.json", "more.pkl", "__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("verb", ["resume", "export", "init_from", "checkpoint.load_from", "checkpoints"])
def test_a_pickle_under_any_name_runs_nothing(copied, checkpoint, tmp_path, capsys, name, verb):
    made, run = copied
    ran = tmp_path / "ran"
    (checkpoint / name).write_bytes(pickle.dumps(Payload(ran)))
    if name not in (SHARD, INDEX, "position.json"):
        # A further file is not looked at, whatever its name: there is an index.
        assert read_contents(checkpoint, "run").saved.position.step == 2
        assert not ran.exists()
        return
    new = ["train", "model=debug", "data=synthetic", "cluster=cpu", f"runs={tmp_path / 'new'}"]
    new += [f"model.{key}={getattr(made.model, key)}" for key in ("dim", "layers", "heads", "kv_heads", "ffn_dim")]
    new += [f"model.vocab_size={made.model.vocab_size}", f"data.vocab_size={made.model.vocab_size}"]
    arguments = {
        "resume": ["resume", str(run.path)],
        "export": ["export", str(run.path), "--into", str(tmp_path / "out")],
        "init_from": [*new, f"init_from={run.path}"],
        "checkpoint.load_from": [*new, f"checkpoint.load_from={run.path}"],
        "checkpoints": ["checkpoints", str(run.path)],
    }[verb]
    assert main(arguments) == (1 if verb == "checkpoints" else 2)
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == (0 if verb == "checkpoints" else 1)
    assert name in said.out + said.err
    assert not ran.exists()
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [SHARD, INDEX, "position.json"])
def test_a_symbolic_link_out_of_the_folder_is_not_followed(pool, copied, checkpoint, tmp_path, name):
    made, run = copied
    outside = tmp_path / "outside"
    shutil.move(checkpoint / name, outside)
    (checkpoint / name).symlink_to(outside)
    with pytest.raises(RankFailure, match=f"DamagedCheckpoint: run=.*its file {name} is a symbolic link; give another"):
        pool.run(1, loaded, tiny.changed(made, steps=3), tiny.begin(made, run))


def test_a_large_index_is_parsed_in_a_time_that_grows_with_its_size(checkpoint):
    """Of 4,096 chunks in 16 × 256 parts, a quarter as many take a quarter of the work: no step compares all pairs."""
    shape, counts = (512, 1024), []
    for rows, columns in ((8, 128), (16, 256)):
        height, width = shape[0] // rows, shape[1] // columns
        size = 4 * height * width
        chunks = [
            [0, size * (row * columns + column), size, row * height, column * width, height, width]
            for row in range(rows)
            for column in range(columns)
        ]
        file = {"name": SHARD, "bytes": 4 * shape[0] * shape[1], "checksums": base64.b64encode(bytes(16)).decode()}
        tensors = {"x": {"dtype": "float32", "shape": shape, "chunks": chunks}}
        rewrite(checkpoint, lambda content, new=(tensors, file): {**content, "tensors": new[0], "files": [new[1]]})
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            index = read_index(checkpoint)
        finally:
            sys.setprofile(None)
        assert len(index.tensors["x"].chunks) == rows * columns
        counts.append(calls)
    # Calls of Python do not depend on the number of chunks at all: numpy does that work.
    assert counts[1] < 1.5 * counts[0]
