"""The cache: made once by several processes, whole or not at all; and hashes that are those of contents."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.until import until
from titanlab.data import cache as data_cache
from titanlab.data.cache import hash_of_files, hash_of_values
from titanlab.errors import ConfigError
from titanlab.system import process_state


def silent(line):
    assert line


def test_root(tmp_path, monkeypatch):
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "a" / "b"))
    assert data_cache.root() == tmp_path / "a" / "b"
    monkeypatch.delenv("TITANLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert data_cache.root() == tmp_path / "xdg" / "titanlab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_cache.root() == tmp_path / "home" / ".cache" / "titanlab"
    assert data_cache.root().is_dir()


def test_root_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="cannot be written.*; export TITANLAB_CACHE=<a folder") as caught:
        data_cache.root()
    assert caught.value.key == "TITANLAB_CACHE"
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="Permission denied"):
        data_cache.root()


def test_a_full_disk_is_named(tmp_path):
    def make(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left on device.*; make room") as caught:
        data_cache.build(tmp_path / "x", make, report=silent)
    assert caught.value.key == "TITANLAB_CACHE"
    assert sorted(each.name for each in tmp_path.iterdir()) == [".x.lock"]


def test_what_failed_leaves_nothing_and_can_be_tried_again(tmp_path):
    def fail(folder):
        (folder / "half").write_text("")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        data_cache.build(tmp_path / "x", fail, report=silent)
    assert not (tmp_path / "x").exists()
    # What a killed process left is removed by the next.
    (tmp_path / ".x.making-dead").mkdir()
    data_cache.build(tmp_path / "x", lambda folder: (folder / "whole").touch(), report=silent)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".x.lock", "x"]
    data_cache.build(tmp_path / "x", fail, report=silent)


def test_three_processes_make_it_once(tmp_path):
    program = """
import os, sys, time
from pathlib import Path
from titanlab.data import cache
def make(folder):
    with open(sys.argv[1] + "/log", "a") as log:
        log.write(f"{os.getpid()}\\n")
    (folder / "first").touch()
    time.sleep(0.5)
    (folder / "last").touch()
target = Path(sys.argv[1], "made")
cache.build(target, make, report=print)
assert (target / "last").exists()
"""
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len((tmp_path / "log").read_text().split()) == 1
    names = [f"waiting for process {process.pid} on {socket.gethostname()}, which prepares" for process in started]
    assert sum(name in each for each in said for name in names) >= 1


def test_a_process_that_waits_for_one_that_is_stopped_says_so(tmp_path):
    program = "import sys; from pathlib import Path; from titanlab.data import cache; "
    program += "cache.build(Path(sys.argv[1]), lambda folder: print(input()), report=print)"
    command = [sys.executable, "-uc", program, str(tmp_path / "made")]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    until((tmp_path / ".made.lock").exists)
    until((tmp_path / ".made.lock").read_text)
    first.send_signal(signal.SIGSTOP)
    until(lambda: process_state(first.pid) == "T")
    second = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert second.stdout is not None
    said = f"waiting for process {first.pid} on {socket.gethostname()}, which is stopped: `kill -CONT {first.pid}`"
    assert second.stdout.readline().startswith(said)
    first.send_signal(signal.SIGCONT)
    assert second.stdout.readline().endswith("prepares the same data\n")
    first.communicate("\n")
    second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)


def test_without_locks_the_first_to_finish_wins(tmp_path, monkeypatch):
    def no_locks(file, flags):
        raise OSError(37, "No locks available")

    def make(folder):
        (folder / "mine").touch()
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "theirs").touch()

    monkeypatch.setattr(data_cache.fcntl, "flock", no_locks)
    data_cache.build(tmp_path / "x", make, report=silent)
    assert [each.name for each in (tmp_path / "x").iterdir()] == ["theirs"]
    assert not list(tmp_path.glob(".x.making-*"))


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch):
    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("TITANLAB_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="TITANLAB_CACHE=null: is not set, and this user has no home folder"):
        data_cache.location()


OLD = 1_000_000_000


@pytest.fixture(autouse=True)
def forgotten():
    """No hash is known from an earlier test."""
    data_cache._cached_hash.cache_clear()


def old(path, content):
    """A file that was last changed years ago."""
    path.write_bytes(content)
    os.utime(path, (OLD, OLD))
    return path


def entries(cache):
    return list((cache / "fingerprints").glob("*"))


@pytest.fixture
def settled(monkeypatch):
    """Files that were just made count as settled: the time of a file's last change of status cannot be set."""
    monkeypatch.setattr(data_cache, "_SETTLED_SECONDS", -3600.0)


def test_values_have_a_hash_that_is_fixed_for_all_time():
    assert hash_of_values() == "7ebb3c7c2a87b1a2f8a7ed729ecb040d"
    assert hash_of_values(1, "é", None, [0.5], {"b": 1, "a": 2}) == hash_of_values(
        1, "é", None, [0.5], {"a": 2, "b": 1}
    )
    found = [
        hash_of_values(*values) for values in ((1,), ("1",), (1.0,), (True,), ([1],), (1, None), (None, 1), ("", "1"))
    ]
    assert len(set(found)) == len(found)
    assert {len(each) for each in found} == {32}


def test_contents_count_and_names_do_not(tmp_path, cache):
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "c.txt").write_bytes(b"one")
    (tmp_path / "a.jsonl").write_bytes(b"one")
    a, b, c, other = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt", "a.jsonl"))
    assert hash_of_files([a, b]) == hash_of_files([c, b])
    found = [hash_of_files(files) for files in ([], [a], [a, b], [b, a], [a, a], [other])]
    assert len(set(found)) == len(found)


def test_where_one_file_ends_and_the_next_begins_counts(tmp_path, cache):
    contents = [(b"ab", b"c"), (b"a", b"bc"), (b"abc", b"")]
    found = set()
    for number, pair in enumerate(contents):
        files = [tmp_path / f"{number}{place}.txt" for place in range(2)]
        for file, content in zip(files, pair, strict=True):
            file.write_bytes(content)
        found.add(hash_of_files(files))
    assert len(found) == 3


def test_large_files_are_read_at_places(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(data_cache, "WHOLE_BYTES", 100)
    monkeypatch.setattr(data_cache, "_BLOCK_BYTES", 4)
    monkeypatch.setattr(data_cache, "_BLOCKS", 3)
    content = bytearray(200)
    path = tmp_path / "a.bin"

    def changed(at):
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


def test_the_hash_is_kept_while_the_file_stays(tmp_path, cache, settled, monkeypatch):
    path = old(tmp_path / "a.txt", b"one")
    first = hash_of_files([path])
    (entry,) = entries(cache)
    assert entry.read_text() == first
    data_cache._cached_hash.cache_clear()
    # Another process finds it, and does not read the file.
    monkeypatch.setattr(data_cache, "_hash", lambda versions: pytest.fail("it was read"))
    assert hash_of_files([path]) == first


def test_a_file_that_was_just_changed_is_always_read(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one")
    first = hash_of_files([path])
    assert entries(cache) == []
    path.write_bytes(b"two")
    assert hash_of_files([path]) != first


@pytest.mark.parametrize("content", ["", "half", "x" * 33])
def test_a_damaged_entry_is_made_again(tmp_path, cache, settled, content):
    path = old(tmp_path / "a.txt", b"one")
    first = hash_of_files([path])
    (entry,) = entries(cache)
    entry.write_text(content)
    data_cache._cached_hash.cache_clear()
    assert hash_of_files([path]) == first
    assert entry.read_text() == first
