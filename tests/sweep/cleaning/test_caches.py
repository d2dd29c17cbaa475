"""What titanlab's caches hold: what may be removed of them, and what is in use or of somebody else."""

import fcntl
import os
import time

import pytest

from titanlab.sweep import cached, clean
from titanlab.sweep.clean import YOUNG_SECONDS


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The cache folder, with one prepared corpus."""
    root = tmp_path / "cache"
    monkeypatch.setenv("TITANLAB_CACHE", str(root))
    monkeypatch.setattr(clean.compile_cache, "own_folder", lambda: tmp_path / "own")
    put(root / "tokens" / "files-abc" / "0.bin", 1000)
    (root / "tokens" / ".files-abc.lock").touch()
    return root


def put(file, size):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))
    return file


def aged(folder):
    old = time.time() - 2 * YOUNG_SECONDS
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (old, old))
    return folder


def found():
    return [(item.kind, item.path.name, item.bytes) for item in cached()]


def test_prepared_data_and_compiled_code_of_both_places(root, tmp_path):
    put(root / "fingerprints" / "f.json", 7)
    put(tmp_path / "own" / "inductor" / "aa" / "x.so", 5)
    put(root / "inductor" / "y.so", 3)
    put(root / "mine" / "thesis.txt", 9)
    assert found() == [
        ("data-cache", "files-abc", 1000),
        ("data-cache", "f.json", 7),
        ("compile-cache", "inductor", 5),
        ("compile-cache", "inductor", 3),
    ]
    # The parent, and nothing outside of it, is where the removal may take place.
    assert {item.root for item in cached()} == {root, tmp_path / "own"}


def test_what_a_killed_process_has_left_counts_after_an_hour(root):
    left = put(root / "tokens" / ".files-def.making-0a1b2c" / "0.bin", 5).parent
    assert [kind for kind, _, _ in found()] == ["data-cache"]
    aged(left)
    assert found() == [("temporary", ".files-def.making-0a1b2c", 5), ("data-cache", "files-abc", 1000)]


def test_what_a_process_still_makes_is_in_use_however_old_it_is(root):
    """A download of more than an hour, or a tokenizer that writes nothing for so long: it lost its folder."""
    aged(put(root / "tokens" / ".files-def.making-0a1b2c" / "0.bin", 5).parent)
    with open(root / "tokens" / ".files-def.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert found() == [("data-cache", "files-abc", 1000)]


def test_links_are_left_alone(root, tmp_path):
    put(tmp_path / "elsewhere" / "inductor" / "x.so", 5)
    (root / "tokens" / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "inductor").symlink_to(tmp_path / "elsewhere" / "inductor")
    # Another user may have made it, in a folder for all.
    (tmp_path / "own").symlink_to(tmp_path / "elsewhere")
    assert found() == [("data-cache", "files-abc", 1000)]


def test_a_compile_cache_of_another_user_is_left_alone(root, tmp_path, monkeypatch):
    put(tmp_path / "own" / "inductor" / "x.so", 5)
    monkeypatch.setattr(clean.os, "getuid", lambda: (tmp_path / "own").stat().st_uid + 1)
    assert [kind for kind, _, _ in found()] == ["data-cache"]
