"""Objects that are written in sequence and read in ranges, and what is told when one is not there."""

from __future__ import annotations

import fsspec
import pytest

from titanlab.checkpoint import StorePath, objects
from titanlab.checkpoint import blocks as files
from titanlab.checkpoint.blocks import DamagedFile, StoreSink, StoreSource
from titanlab.system import StoreFault

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def place(monkeypatch):
    """An empty folder of a store in this process's memory, which answers at once after an error."""
    monkeypatch.setattr(objects, "_WAITS", (0.0, 0.0))
    store = fsspec.filesystem("memory")
    folder = StorePath("memory://titanlab-files")
    yield folder
    if store.exists("/titanlab-files"):
        store.rm("/titanlab-files", recursive=True)


def put(path, content=CONTENT):
    sink = StoreSink(path, len(content))
    for start in range(0, len(content), 100):
        sink.write(memoryview(content)[start : start + 100])
    sink.finish()
    sink.close()


def test_what_was_written_is_read_in_any_range(place, monkeypatch):
    put(place / "a")
    source = StoreSource(place / "a")
    assert source.size == len(CONTENT)
    for piece in (1000, 7, 1):
        monkeypatch.setattr(files, "_PIECE", piece)
        for start, size in [(0, 1024), (0, 0), (5, 1), (3, 50), (1000, 24)]:
            target = bytearray(size)
            source.read(memoryview(target), start)
            assert target == CONTENT[start : start + size]
    source.close()


def test_an_empty_object_is_one(place):
    put(place / "a", b"")
    assert StoreSource(place / "a").size == 0


def test_an_object_that_is_not_there_is_missing(place):
    with pytest.raises(DamagedFile, match="^its file a is missing$"):
        StoreSource(place / "a")
    put(place / "a")
    source = StoreSource(place / "a")
    objects.filesystem(place)[0].rm("/titanlab-files/a")
    with pytest.raises(DamagedFile, match="^its file a is missing$"):
        source.read(memoryview(bytearray(5)), 0)


def test_fewer_bytes_than_asked_for_are_a_fault(place):
    put(place / "a")
    source = StoreSource(place / "a")
    put(place / "a", CONTENT[:10])
    with pytest.raises(StoreFault):
        source.read(memoryview(bytearray(20)), 0)


def test_an_error_of_the_store_is_a_fault_that_names_the_object(place, monkeypatch):
    class Broken:
        def open(self, *given, **more):
            raise RuntimeError("out of luck")

    monkeypatch.setattr(files, "filesystem", lambda path: (Broken(), "x"))
    with pytest.raises(StoreFault) as caught:
        StoreSink(place / "a", 5)
    assert "out of luck" in str(caught.value)
    assert "memory://titanlab-files/a" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "part"),
    [(0, 64 << 20), (9_000 * (64 << 20), 64 << 20), (9_000 * (64 << 20) + 1, (64 << 20) + 1), (10**13, 1111111112)],
)
def test_a_large_object_has_larger_parts_for_a_store_takes_ten_thousand(place, monkeypatch, size, part):
    asked = []

    class Noting:
        def open(self, name, mode, *, block_size):
            asked.append((name, mode, block_size))

    monkeypatch.setattr(files, "filesystem", lambda path: (Noting(), "x"))
    StoreSink(place / "a", size)
    assert asked == [("x", "wb", part)]
