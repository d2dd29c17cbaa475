"""Hashes of data: the same for the same contents wherever they are, and kept so that files are read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titanlab.data import cache as data_cache
from titanlab.data.cache import hash_of_files, hash_of_values

OLD = 1_000_000_000


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """No hash is known from an earlier test."""
    data_cache._cached_hash.cache_clear()


def old(path: Path, content: bytes) -> Path:
    """A file that was last changed years ago."""
    path.write_bytes(content)
    os.utime(path, (OLD, OLD))
    return path


def entries(cache: Path) -> list[Path]:
    return list((cache / "fingerprints").glob("*"))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were just made count as settled: the time of a file's last change of status cannot be set."""
    monkeypatch.setattr(data_cache, "_SETTLED_SECONDS", -3600.0)


def test_values_have_a_hash_that_is_fixed_for_all_time() -> None:
    assert hash_of_values() == "7ebb3c7c2a87b1a2f8a7ed729ecb040d"
    assert hash_of_values(1, "é", None, [0.5], {"b": 1, "a": 2}) == hash_of_values(
        1, "é", None, [0.5], {"a": 2, "b": 1}
    )
    found = [
        hash_of_values(*values) for values in ((1,), ("1",), (1.0,), (True,), ([1],), (1, None), (None, 1), ("", "1"))
    ]
    assert len(set(found)) == len(found)
    assert {len(each) for each in found} == {32}


def test_a_value_that_is_no_json_is_an_error() -> None:
    with pytest.raises(TypeError):
        hash_of_values({1, 2})


def test_contents_count_and_names_do_not(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "c.txt").write_bytes(b"one")
    (tmp_path / "a.jsonl").write_bytes(b"one")
    a, b, c, other = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt", "a.jsonl"))
    assert hash_of_files([a, b]) == hash_of_files([c, b])
    found = [hash_of_files(files) for files in ([], [a], [a, b], [b, a], [a, a], [other])]
    assert len(set(found)) == len(found)


def test_where_one_file_ends_and_the_next_begins_counts(tmp_path: Path, cache: Path) -> None:
    contents = [(b"ab", b"c"), (b"a", b"bc"), (b"abc", b"")]
    found = set()
    for number, pair in enumerate(contents):
        files = [tmp_path / f"{number}{place}.txt" for place in range(2)]
        for file, content in zip(files, pair, strict=True):
            file.write_bytes(content)
        found.add(hash_of_files(files))
    assert len(found) == 3


def test_large_files_are_read_at_places(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_cache, "WHOLE_BYTES", 100)
    monkeypatch.setattr(data_cache, "_BLOCK_BYTES", 4)
    monkeypatch.setattr(data_cache, "_BLOCKS", 3)
    content = bytearray(200)
    path = tmp_path / "a.bin"

    def changed(at: int) -> str:
        path.write_bytes(content[:at] + b"x" + content[at + 1 :])
        return hash_of_files([path])

    path.write_bytes(content)
    first = hash_of_files([path])
    # The blocks begin at 0, 98 and 196.
    for at, is_read in ((0, True), (3, True), (4, False), (97, False), (98, True), (101, True), (102, False)):
        assert (changed(at) != first) is is_read, at
    assert changed(199) != first
    path.write_bytes(bytes(201))
    assert hash_of_files([path]) != first
    # A small file beside a large one is read as a whole.
    (tmp_path / "small").write_bytes(bytes(12))
    path.write_bytes(content)
    both = hash_of_files([path, tmp_path / "small"])
    (tmp_path / "small").write_bytes(bytes(6) + b"x" + bytes(5))
    assert hash_of_files([path, tmp_path / "small"]) != both


def test_the_hash_is_kept_while_the_file_stays(
    tmp_path: Path, cache: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old(tmp_path / "a.txt", b"one")
    first = hash_of_files([path])
    (entry,) = entries(cache)
    assert entry.read_text() == first
    data_cache._cached_hash.cache_clear()
    # Another process finds it, and does not read the file.
    monkeypatch.setattr(data_cache, "_hash", lambda versions: pytest.fail("it was read"))
    assert hash_of_files([path]) == first


def test_a_file_of_another_size_is_read_again(tmp_path: Path, cache: Path, settled: None) -> None:
    path = old(tmp_path / "a.txt", b"one")
    first = hash_of_files([path])
    assert hash_of_files([old(path, b"three")]) != first
    assert len(entries(cache)) == 2


def test_a_file_that_was_just_changed_is_always_read(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one")
    first = hash_of_files([path])
    assert entries(cache) == []
    path.write_bytes(b"two")
    assert hash_of_files([path]) != first


@pytest.mark.parametrize("content", ["", "half", "x" * 33])
def test_a_damaged_entry_is_made_again(tmp_path: Path, cache: Path, settled: None, content: str) -> None:
    path = old(tmp_path / "a.txt", b"one")
    first = hash_of_files([path])
    (entry,) = entries(cache)
    entry.write_text(content)
    data_cache._cached_hash.cache_clear()
    assert hash_of_files([path]) == first
    assert entry.read_text() == first


def test_an_entry_that_cannot_be_written_is_no_error(tmp_path: Path, cache: Path, settled: None) -> None:
    path = old(tmp_path / "a.txt", b"one")
    cache.mkdir()
    (cache / "fingerprints").write_text("a file")
    assert len(hash_of_files([path])) == 32


def test_a_file_that_is_missing_is_an_error(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hash_of_files([tmp_path / "none"])
