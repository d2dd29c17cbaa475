"""Reading index.json: what was written comes back, and each rule that is broken is named."""

from __future__ import annotations

import json
import struct

import pytest

from titanlab.checkpoint import index_reader as reader
from titanlab.checkpoint.blocks import BLOCK, DamagedFile, checksum
from titanlab.checkpoint.index import IndexedFile, OtherFormat, index_bytes, signed
from titanlab.checkpoint.index_reader import read_index

FILES = (IndexedFile(name="rank-00000.safetensors", size=100, checksums=[5]),)
# Two halves of a matrix, and a scalar.
TENSORS = {
    "x": ("float32", (4, 2), [[0, 8, 16, 0, 0, 2, 2], [0, 24, 16, 2, 0, 2, 2]]),
    "s": ("int64", (), [[0, 40, 8]]),
}


def made(folder, **changed):
    given = {"position": b"here", "objects": {"n": 3}, "tensors": TENSORS, "files": FILES, **changed}
    (folder / "index.json").write_bytes(index_bytes(**given))
    return folder


def rewritten(folder, change):
    """Change the content of an index, and sign it again."""
    made(folder)
    content = json.loads((folder / "index.json").read_bytes())
    del content["checksum"]
    change(content)
    (folder / "index.json").write_bytes(signed(json.dumps(content).encode()))


def refusal(folder):
    with pytest.raises(DamagedFile) as caught:
        read_index(folder)
    return str(caught.value)


def test_an_index_comes_back(tmp_path):
    index = read_index(made(tmp_path))
    assert (index.position_bytes, index.position_checksum) == (4, checksum(b"here"))
    assert index.objects == {"n": 3}
    assert list(index.files) == list(FILES)
    assert list(index.tensors) == ["x", "s"]
    assert (index.tensors["x"].dtype, index.tensors["x"].shape) == ("float32", (4, 2))
    assert index.tensors["x"].chunks.tolist() == TENSORS["x"][2]
    assert (index.tensors["s"].shape, index.tensors["s"].chunks.tolist()) == ((), [[0, 40, 8]])


def test_an_index_of_nothing_comes_back(tmp_path):
    index = read_index(made(tmp_path, position=b"", objects={}, tensors={}, files=()))
    assert (index.position_bytes, index.objects, index.tensors, list(index.files)) == (0, {}, {}, [])


def test_tensors_without_elements_have_no_bytes(tmp_path):
    tensors = {"e": ("float32", (0, 5), [[0, 8, 0, 0, 0, 0, 5]]), "none": ("bool", (3, 0), [])}
    index = read_index(made(tmp_path, tensors=tensors))
    assert index.tensors["e"].chunks.tolist() == [[0, 8, 0, 0, 0, 0, 5]]
    assert index.tensors["none"].chunks.shape == (0, 7)


def test_a_file_has_a_checksum_for_each_block(tmp_path):
    files = [
        IndexedFile(name="rank-00000.safetensors", size=2 * BLOCK, checksums=[1, 2]),
        IndexedFile(name="rank-00001.safetensors", size=2 * BLOCK + 1, checksums=[1, 2, 2**64 - 1]),
        IndexedFile(name="rank-123456789.safetensors", size=0, checksums=[]),
    ]
    assert list(read_index(made(tmp_path, tensors={}, files=files)).files) == files
    short = [IndexedFile(name="rank-00000.safetensors", size=BLOCK + 1, checksums=[1])]
    made(tmp_path, tensors={}, files=short)
    assert refusal(tmp_path) == "its file index.json lacks one checksum for each block of rank-00000.safetensors"


def test_a_changed_byte_is_found_wherever_it_is(tmp_path):
    content = (made(tmp_path) / "index.json").read_bytes()
    for at in (*range(32), *range(32, len(content), 37)):
        (tmp_path / "index.json").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        said = refusal(tmp_path)
        assert said in (
            "its file index.json is no index of a checkpoint",
            "its file index.json has other bytes than were saved",
        )
    for kept in (*range(32), len(content) - 1):
        (tmp_path / "index.json").write_bytes(content[:kept])
        refusal(tmp_path)


def test_what_is_no_file_is_refused(tmp_path):
    assert refusal(tmp_path) == "its file index.json is missing"
    (tmp_path / "index.json").mkdir()
    assert refusal(tmp_path) == "its index.json is no file"


def test_an_index_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    size = (made(tmp_path) / "index.json").stat().st_size
    monkeypatch.setattr(reader, "MOST_BYTES", size)
    read_index(tmp_path)
    monkeypatch.setattr(reader, "MOST_BYTES", size - 1)
    with pytest.raises(DamagedFile, match=r"index\.json"):
        read_index(tmp_path)


@pytest.mark.parametrize("version", [0, 2, -1, 10**30])
def test_another_format_is_no_damage(tmp_path, version):
    rewritten(tmp_path, lambda content: content.update(format=version, later=1))
    with pytest.raises(OtherFormat, match=f"^has the format {version}, and this version of titanlab reads 1$"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a":1}', "index.json does not fit (Object contains unknown field `a`)"),
        (b"{]", "file index.json is no JSON (JSON is malformed: "),
        (b'{"objects":NaN}', "file index.json is no JSON (JSON is malformed: "),
        (b'{"objects":{"a":' + b"[" * 100_000, "file index.json is no JSON ("),
    ],
)
def test_content_that_is_no_index_is_said(tmp_path, content, said):
    (tmp_path / "index.json").write_bytes(signed(content))
    assert refusal(tmp_path).startswith(f"its {said}")


def of(*path, value):
    """A change of one value."""

    def change(content):
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def without(name):
    return lambda content: content.pop(name)


BROKEN = {
    "no tensors": (without("tensors"), "missing required field `tensors`"),
    "no format": (without("format"), "missing required field `format`"),
    "a format of text": (of("format", value="1"), "has format: Expected `int`, got `str`"),
    "an unknown key": (of("x" * 50, value=1), f"unknown field `{'x' * 50}`"),
    "a position of a list": (of("position", value=[]), "has position: Expected `object`, got `array`"),
    "a negative size of the position": (of("position", "bytes", value=-1), "has position.bytes: Expected `int` >= 0"),
    "a size that is true": (of("position", "bytes", value=True), "has position.bytes: Expected `int`, got `bool`"),
    "a size of 2**62": (of("position", "bytes", value=2**62), "has position.bytes: Expected `int` <= "),
    "a short checksum": (of("position", "checksum", value="ab"), "has position.checksum: Expected `str` matching regex"),
    "files of a mapping": (of("files", value={}), "has files: Expected `array`, got `object`"),
    "a file of text": (of("files", value=["a"]), "has files[0]: Expected `object`, got `str`"),
    "a file outside": (of("files", 0, "name", value="../rank-00000.safetensors"), "has files[0].name: Expected `str` matching regex"),
    "a rank of four digits": (of("files", 0, "name", value="rank-0000.safetensors"), "has files[0].name: Expected `str` matching regex"),
    "checksums of a list": (of("files", 0, "checksums", value=[]), "has files[0].checksums: Expected `bytes`, got `array`"),
    "checksums that are cut": (of("files", 0, "checksums", value="AAA"), "has files[0].checksums: Invalid base64 encoded string"),
    "a file twice": (lambda content: content["files"].append(content["files"][0]), "lacks files of different names"),
    "objects of a list": (of("objects", value=[]), "has objects: Expected `object`, got `array`"),
    "a name for two": (of("objects", "x", value=1), "lacks different names of tensors and objects"),
    "an unknown dtype": (of("tensors", "x", "dtype", value="float"), "a dtype"),
    "too many dims": (of("tensors", "x", "shape", value=[1] * 33), "has tensors[...].shape: Expected `array` of length <= 32"),
    "a tensor that is too large": (of("tensors", "x", "shape", value=[2**29, 2**29]), "a size of x"),
    "an empty one that is too large": (of("tensors", "x", "shape", value=[0, 2**58]), "a size of x"),
    "chunks of text": (of("tensors", "x", "chunks", value="ab"), "has tensors[...].chunks: Expected `array`, got `str`"),
    "a chunk of other dims": (of("tensors", "x", "chunks", value=[[0, 8, 32, 0, 4]]), "chunks of x of its dimensions"),
    "a chunk of floats": (of("tensors", "s", "chunks", 0, 1, value=40.0), "has tensors[...].chunks[0][1]: Expected `int`, got `float`"),
    "a negative start": (of("tensors", "s", "chunks", 0, 1, value=-8), "has tensors[...].chunks[0][1]: Expected `int` >= 0"),
    "an offset outside": (of("tensors", "x", "chunks", 1, 3, value=3), "chunks inside of x"),
    "another file": (of("tensors", "s", "chunks", 0, 0, value=1), "the files of s"),
    "other bytes": (of("tensors", "s", "chunks", 0, 2, value=4), "the bytes of s"),
    "bytes behind the file": (of("tensors", "s", "chunks", 0, 1, value=93), "bytes of s inside of their file"),
    "a hole": (lambda content: content["tensors"]["x"]["chunks"].pop(), "chunks that fill x, each part of it once"),
    "no chunk of a scalar": (of("tensors", "s", "chunks", value=[]), "chunks that fill s, each part of it once"),
    "the same bytes": (of("tensors", "s", "chunks", 0, 1, value=32), "chunks whose bytes are apart"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_rule_that_is_broken_is_named(tmp_path, name):
    change, rule = BROKEN[name]
    rewritten(tmp_path, change)
    assert rule in refusal(tmp_path)


def test_the_end_of_a_file_is_inside_of_it(tmp_path):
    rewritten(tmp_path, of("tensors", "s", "chunks", 0, 1, value=92))
    assert read_index(tmp_path).tensors["s"].chunks.tolist() == [[0, 92, 8]]


def test_a_number_beyond_64_bits_is_one_line(tmp_path):
    rewritten(tmp_path, of("tensors", "s", "chunks", 0, 1, value=2**64))
    assert refusal(tmp_path) == "its index.json has tensors[...].chunks[0][1]: Expected `int` <= 4611686018427387903"


def test_checksums_are_little_endian(tmp_path):
    made(tmp_path, tensors={}, files=[IndexedFile(name="rank-00000.safetensors", size=1, checksums=[1])])
    assert read_index(tmp_path).files[0].checksums == [struct.unpack("<Q", b"\x01" + bytes(7))[0]]
