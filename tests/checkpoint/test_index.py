"""index.json: the bytes that are written."""

from __future__ import annotations

import base64
import json
import struct

import numpy as np
import pytest

from titanlab.checkpoint.blocks import checksum
from titanlab.checkpoint.index import IndexedFile, IndexedTensor, index_bytes, signed


def tensor(shape, *rows):
    return IndexedTensor(dtype="float32", shape=shape, chunks=np.array(rows, np.int64).reshape(-1, 3 + 2 * len(shape)))


def test_an_empty_index():
    content = index_bytes(position=b"", objects={}, tensors={}, files=[])
    body = b'"format":1,"position":{"bytes":0,"checksum":"%016x"},"objects":{},"tensors":{},"files":[]}' % checksum(b"")
    assert content == b'{"checksum":"%016x",' % checksum(body) + body


def test_everything_has_its_place():
    content = json.loads(
        index_bytes(
            position=b"{}\n",
            objects={"optimizer.step": 3, "é": None},
            tensors={"x": ("float32", (2, 3), [[0, 8, 24, 0, 0, 2, 3]])},
            files=[
                IndexedFile(name="a", size=2_000_000, checksums=[1, 2**64 - 1]),
                IndexedFile(name="b", size=0, checksums=[]),
            ],
        )
    )
    assert content["position"] == {"bytes": 3, "checksum": f"{checksum(b'{}' + bytes([10])):016x}"}
    assert content["objects"] == {"optimizer.step": 3, "é": None}
    assert content["tensors"] == {"x": {"dtype": "float32", "shape": [2, 3], "chunks": [[0, 8, 24, 0, 0, 2, 3]]}}
    first, second = content["files"]
    assert struct.unpack("<2Q", base64.b64decode(first.pop("checksums"))) == (1, 2**64 - 1)
    assert (first, second) == ({"name": "a", "bytes": 2_000_000}, {"name": "b", "bytes": 0, "checksums": ""})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_no_json_is_not_written(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        index_bytes(position=b"", objects={"x": value}, tensors={}, files=[])


def test_the_checksum_is_of_what_follows_it():
    assert signed(b'{"a":1}') == b'{"checksum":"%016x","a":1}' % checksum(b'"a":1}')


def test_a_chunk_is_found_by_its_offsets():
    parts = tensor((4, 6), (0, 0, 24, 0, 0, 2, 3), (0, 24, 24, 0, 3, 2, 3), (1, 0, 48, 2, 0, 2, 6))
    assert parts.offsets.tolist() == [[0, 0], [0, 3], [2, 0]]
    assert parts.sizes.tolist() == [[2, 3], [2, 3], [2, 6]]
    assert [parts.chunk_at(at) for at in ([0, 0], (0, 3), (2, 0))] == [0, 1, 2]
    with pytest.raises(IndexError):
        parts.chunk_at((1, 0))
    scalar = tensor((), (0, 0, 4))
    assert (scalar.offsets.shape, scalar.sizes.shape, scalar.chunk_at(())) == ((1, 0), (1, 0), 0)
