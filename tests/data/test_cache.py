"""The cache: made once by several processes at a time, whole or not at all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.until import until
from titanlab.data import cache
from titanlab.data import cache as data_cache
from titanlab.errors import ConfigError


def silent(line: str) -> None:
    assert line


def test_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "a" / "b"))
    assert cache.root() == tmp_path / "a" / "b"
    monkeypatch.delenv("TITANLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.root() == tmp_path / "xdg" / "titanlab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.root() == tmp_path / "home" / ".cache" / "titanlab"
    assert cache.root().is_dir()


def test_root_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="cannot be written.*; export TITANLAB_CACHE=<a folder") as caught:
        cache.root()
    assert caught.value.key == "TITANLAB_CACHE"
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="Permission denied"):
        cache.root()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left on device.*; make room") as caught:
        cache.build(tmp_path / "x", make, report=silent)
    assert caught.value.key == "TITANLAB_CACHE"
    assert sorted(each.name for each in tmp_path.iterdir()) == [".x.lock"]


def test_what_failed_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.build(tmp_path / "x", fail, report=silent)
    assert not (tmp_path / "x").exists()
    # What a killed process left is removed by the next.
    (tmp_path / ".x.making-dead").mkdir()
    cache.build(tmp_path / "x", lambda folder: (folder / "whole").touch(), report=silent)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".x.lock", "x"]
    cache.build(tmp_path / "x", fail, report=silent)


def test_three_processes_make_it_once(tmp_path: Path) -> None:
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


def test_a_process_that_waits_for_one_that_is_stopped_says_so(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from titanlab.data import cache; "
    program += "cache.build(Path(sys.argv[1]), lambda folder: print(input()), report=print)"
    command = [sys.executable, "-uc", program, str(tmp_path / "made")]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    until((tmp_path / ".made.lock").exists)
    until((tmp_path / ".made.lock").read_text)
    first.send_signal(signal.SIGSTOP)
    second = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert second.stdout is not None
    said = f"waiting for process {first.pid} on {socket.gethostname()}, which is stopped: `kill -CONT {first.pid}`"
    assert second.stdout.readline().startswith(said)
    first.send_signal(signal.SIGCONT)
    assert second.stdout.readline().endswith("prepares the same data\n")
    first.communicate("\n")
    second.communicate(timeout=20)
    assert (first.returncode, second.returncode) == (0, 0)


def test_without_locks_the_first_to_finish_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: object, flags: int) -> None:
        raise OSError(37, "No locks available")

    def make(folder: Path) -> None:
        (folder / "mine").touch()
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "theirs").touch()

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    cache.build(tmp_path / "x", make, report=silent)
    assert [each.name for each in (tmp_path / "x").iterdir()] == ["theirs"]
    assert not list(tmp_path.glob(".x.making-*"))


def test_fingerprint_is_of_contents_in_order(tmp_path: Path, cache: Path) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("one")
    b.write_text("two")
    first = data_cache.hash_of_files([a, b])
    assert first == data_cache.hash_of_files([a, b])
    assert first != data_cache.hash_of_files([b, a])
    a.rename(tmp_path / "c.txt")
    assert first == data_cache.hash_of_files([tmp_path / "c.txt", b])
    b.write_text("owt")
    assert first != data_cache.hash_of_files([tmp_path / "c.txt", b])


def test_fingerprint_is_remembered_until_a_file_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    # As if the file had been there for a while: a change of the last seconds is read again in any case.
    monkeypatch.setattr(data_cache, "_SETTLED_SECONDS", -time.time())
    first = data_cache.hash_of_files([file])
    assert len(list((cache / "fingerprints").iterdir())) == 1
    data_cache._cached_hash.cache_clear()
    monkeypatch.setattr(data_cache, "_hash", lambda seen: pytest.fail("read again"))
    assert data_cache.hash_of_files([file]) == first
    monkeypatch.undo()
    os.utime(file, ns=(1, 1))
    file.write_text("two")
    assert data_cache.hash_of_files([file]) != first


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_cache, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(data_cache, "_BLOCK_BYTES", 10)
    file = tmp_path / "large"
    content = bytearray(5000)
    seen = set()
    for place in (None, 0, 4999, 2500, 4990):
        changed = bytearray(content)
        if place is not None:
            changed[place] = 1
        file.write_bytes(changed)
        seen.add(data_cache.hash_of_files([file]))
    file.write_bytes(bytes(5001))
    seen.add(data_cache.hash_of_files([file]))
    assert len(seen) >= 5


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("TITANLAB_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="TITANLAB_CACHE=null: is not set, and this user has no home folder"):
        cache.location()
