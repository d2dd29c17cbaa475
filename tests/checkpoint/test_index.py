"""index.json: what was written comes back, each rule that is broken is one line, and which boxes fill a tensor."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.checkpoint import DamagedCheckpoint, index, read_contents
from titanlab.checkpoint.index import (
    IndexedFile,
    IndexEntry,
    OtherFormat,
    PositionSum,
    fills,
    index_bytes,
    needed_spans,
    read_index,
    signed,
)
from titanlab.checkpoint.storage import BLOCK, DamagedFile, checksum
from titanlab.errors import ConfigError

SHARD = "rank-00000.safetensors"
FILES = (IndexedFile(name=SHARD, size=100, checksums=bytes(range(8))),)
# Two halves of a matrix, and a scalar.
TENSORS = {
    "x": IndexEntry("float32", [4, 2], [[0, 8, 16, 0, 0, 2, 2], [0, 24, 16, 2, 0, 2, 2]]),
    "s": IndexEntry("int64", [], [[0, 40, 8]]),
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
    tensors = TENSORS | {
        "e": IndexEntry("float32", [0, 5], [[0, 8, 0, 0, 0, 0, 5]]),
        "none": IndexEntry("bool", [3, 0], []),
    }
    found, read = read_index(made(tmp_path, tensors=tensors))
    assert found.position == PositionSum.of(b"here") == PositionSum(size=4, checksum=f"{checksum(b'here'):016x}")
    assert (found.objects, tuple(found.files), list(read)) == ({"n": 3}, FILES, list(tensors))
    for name, entry in tensors.items():
        tensor = read[name]
        assert (tensor.dtype, list(tensor.shape), tensor.chunks.tolist()) == (entry.dtype, entry.shape, entry.chunks)
    assert read["none"].chunks.shape == (0, 7)
    content = json.loads((tmp_path / "index.json").read_bytes())
    assert list(content) == ["checksum", "format", "position", "objects", "tensors", "files"]
    assert content["files"] == [{"name": SHARD, "bytes": 100, "checksums": "AAECAwQFBgc="}]
    assert content["tensors"]["s"] == {"dtype": "int64", "shape": [], "chunks": [[0, 40, 8]]}
    empty, none = read_index(made(tmp_path, position=b"", objects={}, tensors={}, files=()))
    assert (empty.position.size, empty.objects, none, list(empty.files)) == (0, {}, {}, [])


def test_a_file_has_a_checksum_for_each_block(tmp_path):
    sizes = {SHARD: 2 * BLOCK, "rank-00001.safetensors": 2 * BLOCK + 1, "rank-123456789.safetensors": 0}
    files = [IndexedFile(name=name, size=size, checksums=bytes(8 * -(-size // BLOCK))) for name, size in sizes.items()]
    assert read_index(made(tmp_path, tensors={}, files=files))[0].files == files
    for count in (1, 3):
        made(tmp_path, tensors={}, files=[IndexedFile(name=SHARD, size=BLOCK + 1, checksums=bytes(8 * count))])
        assert refusal(tmp_path) == f"its file index.json lacks one checksum for each block of {SHARD}"


def test_a_changed_byte_is_found_wherever_it_is(tmp_path):
    content = (made(tmp_path) / "index.json").read_bytes()
    changed = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(0, len(content), 5)]
    for other in (*changed, *(content[:kept] for kept in (0, 11, 31, len(content) - 1))):
        (tmp_path / "index.json").write_bytes(other)
        assert refusal(tmp_path) in (
            "its file index.json is not an index of a checkpoint",
            "its file index.json has other bytes than were saved",
        )


def test_what_is_no_file_of_a_possible_size_is_refused(tmp_path, monkeypatch):
    assert refusal(tmp_path) == "its file index.json is missing"
    size = (made(tmp_path) / "index.json").stat().st_size
    monkeypatch.setattr(index, "MOST_BYTES", size)
    read_index(tmp_path)
    monkeypatch.setattr(index, "MOST_BYTES", size - 1)
    assert refusal(tmp_path) == f"its file index.json has more than {size - 1} bytes"


@pytest.mark.parametrize("version", [0, 2, -1, 10**30])
def test_another_format_is_no_damage(tmp_path, version):
    rewritten(tmp_path, lambda content: content.update(format=version, later=1))
    with pytest.raises(OtherFormat, match=f"^has the format {version}, and this version of titanlab reads 1$"):
        read_index(tmp_path)
    with pytest.raises(ConfigError, match="titanlab reads 1; use the version of titanlab that saved it") as refused:
        read_contents(tmp_path, "run")
    assert not isinstance(refused.value, DamagedCheckpoint)


NESTED = b'{"objects":{"a":' + b"[" * 100_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a":1}', "index.json does not fit (Object missing required field `format`)"),
        (b"[1,2]", "file index.json is not JSON (JSON is malformed: "),
        (b"{]", "file index.json is not JSON (JSON is malformed: "),
        (b'{"format":1,"\xff":1}', "file index.json is not JSON ("),
        (b'{"objects":NaN}', "file index.json is not JSON (JSON is malformed: "),
        (NESTED, "file index.json is not JSON ("),
    ],
    ids=lambda value: str(value)[:20],
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


def of_shape(value):
    return of("tensors", "x", "shape", value=value)


def of_chunk(column, value):
    return of("tensors", "s", "chunks", 0, column, value=value)


def of_file(name, value):
    return of("files", 0, name, value=value)


BROKEN = {
    "no tensors": (without("tensors"), "missing required field `tensors`"),
    "no format": (without("format"), "missing required field `format`"),
    "an unknown key": (of("x" * 50, value=1), f"unknown field `{'x' * 50}`"),
    "a negative size of the position": (of("position", "bytes", value=-1), "has position.bytes: Expected `int` >= 0"),
    "a size of 2**62": (of("position", "bytes", value=2**62), "has position.bytes: Expected `int` <= "),
    "a short checksum": (of("position", "checksum", value="ab"), "has position.checksum: Expected `str` matching regex"),
    "a file outside": (of_file("name", "../rank-00000.safetensors"), "has files[0].name: Expected `str` matching regex"),
    "a file with a newline": (of_file("name", f"{SHARD}\n"), "has files[0].name: Expected `str` matching regex"),
    "a file of another size": (of_file("bytes", 5), "bytes of x inside of their file"),
    "checksums that are cut": (of_file("checksums", "AAA"), "has files[0].checksums: Invalid base64 encoded string"),
    "a file twice": (lambda content: content["files"].append(content["files"][0]), "lacks a different name for each file"),
    "a name for two": (of("objects", "x", value=1), "lacks different names for tensors and objects"),
    "an unknown dtype": (of("tensors", "x", "dtype", value="posix.system"), "a dtype"),
    "too many dims": (of_shape([1] * 33), "has tensors[...].shape: Expected `array` of length <= 32"),
    "a tensor that is too large": (of_shape([2**29, 2**29]), "a size of x"),
    "an empty one that is too large": (of_shape([0, 2**58]), "a size of x"),
    "a chunk of other dims": (of("tensors", "x", "chunks", value=[[0, 8, 32, 0, 4]]), "chunks of x with as many dimensions as its shape"),
    "a negative start": (of_chunk(1, -8), "has tensors[...].chunks[0][1]: Expected `int` >= 0"),
    "a start beyond 64 bits": (of_chunk(1, 2**64), "has tensors[...].chunks[0][1]: Expected `int` <= 4611686018427387903"),
    "an offset outside": (of("tensors", "x", "chunks", 1, 3, value=3), "chunks inside of x"),
    "a size outside": (of("tensors", "x", "chunks", 1, -1, value=2**62 - 1), "chunks inside of x"),
    "another file": (of_chunk(0, 1), "the files of s"),
    "other bytes": (of_chunk(2, 4), "the bytes of s"),
    "bytes behind the file": (of_chunk(1, 93), "bytes of s inside of their file"),
    "a hole": (lambda content: content["tensors"]["x"]["chunks"].pop(), "chunks that fill x, each part of it once"),
    "no chunk of a scalar": (of("tensors", "s", "chunks", value=[]), "chunks that fill s, each part of it once"),
    "the same bytes": (of_chunk(1, 32), "separate bytes for each chunk"),
    "a long name of several lines": (of("tensors", value={"x\ny\n" * 500: {"dtype": "bool", "shape": [2], "chunks": []}}), "chunks that fill x y x y"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_rule_that_is_broken_is_named_in_one_line(tmp_path, name):
    change, rule = BROKEN[name]
    rewritten(tmp_path, change)
    said = refusal(tmp_path)
    assert rule in said
    assert "\n" not in said
    assert len(said) < 400
    with pytest.raises(DamagedCheckpoint, match="^run="):
        read_contents(tmp_path, "run")


def test_the_end_of_a_file_is_inside_of_it(tmp_path):
    rewritten(tmp_path, of_chunk(1, 92))
    assert read_index(tmp_path)[1]["s"].chunks.tolist() == [[0, 92, 8]]


@st.composite
def boxes(draw):
    """A tensor, and boxes inside of it: those of a cut into parts, of which a few are changed."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    parts = [([0] * len(shape), shape)]
    for dim in draw(st.lists(st.integers(0, len(shape) - 1), max_size=5)) if shape else []:
        number = draw(st.integers(0, len(parts) - 1))
        offsets, sizes = parts.pop(number)
        cut = draw(st.integers(0, sizes[dim]))
        first, second = [*sizes], [*sizes]
        first[dim], second[dim] = cut, sizes[dim] - cut
        begin = [*offsets]
        begin[dim] += cut
        parts += [(offsets, first), (begin, second)]
    for change in draw(st.lists(st.sampled_from(["drop", "twice", "move"]), max_size=2)):
        number = draw(st.integers(0, len(parts) - 1))
        if change == "drop" and len(parts) > 1:
            del parts[number]
        elif change == "twice":
            parts.append(parts[number])
        else:
            sizes = parts[number][1]
            room = [size - part for size, part in zip(shape, sizes, strict=True)]
            parts[number] = ([draw(st.integers(0, most)) for most in room], sizes)
    return tuple(shape), draw(st.permutations(parts))


@given(boxes())
def test_boxes_fill_a_tensor_if_each_element_is_in_exactly_one(drawn):
    shape, parts = drawn
    counts = np.zeros(shape, np.int64)
    for offsets, sizes in parts:
        counts[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
    offsets, sizes = np.array(parts, np.int64).reshape(len(parts), 2, len(shape)).transpose(1, 0, 2)
    assert fills(shape, offsets, sizes) == bool((counts == 1).all())


@pytest.mark.parametrize("gap", [1, 8, 40, 10**6])
def test_spans_hold_the_part_and_skip_wide_gaps(gap):
    rng = random.Random(gap)
    for _ in range(200):
        dims = rng.randint(0, 4)
        sizes = [rng.randint(1, 5) for _ in range(dims)]
        offsets = [rng.randrange(size) for size in sizes]
        lengths = [rng.randint(1, size - at) for size, at in zip(sizes, offsets, strict=True)]
        numbers = np.arange(int(np.prod(sizes, initial=1))).reshape(sizes)
        part = numbers[tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))]
        wanted = {4 * int(number) + byte for number in part.reshape(-1) for byte in range(4)}
        spans = needed_spans(sizes, offsets, lengths, 4, gap)
        covered = [byte for first, end in spans for byte in range(first, end)]
        assert len(covered) == len(set(covered))
        assert wanted <= set(covered)
        # No range of unneeded bytes is as wide as the gap.
        extra = sorted(set(covered) - wanted)
        runs = [list(group) for _, group in itertools.groupby(enumerate(extra), lambda pair: pair[1] - pair[0])]
        assert all(len(run) < gap for run in runs)
    assert needed_spans([3, 4], [0, 0], [2, 0], 4, gap) == []
