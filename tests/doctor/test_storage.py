"""Folders of runs and caches: room, speed, locks, and whether other hosts see them."""

import errno
import os
from pathlib import Path

import pytest

from tests.doctor.programs import states
from tests.doctor.volumes import GIB, volume
from titanlab.doctor import storage
from titanlab.system import FAIL


def test_the_folder_of_runs_is_written_to_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_WRITTEN_BYTES", 4 << 20)
    found = states(storage.check_runs(tmp_path / "not" / "made", needs_shared=False))
    assert {"folder of runs", "file system", "writing", "locks"} <= set(found)
    assert os.listdir(tmp_path) == []


def test_folders_that_are_bad(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.os, "access", lambda path, mode: False)
    assert states(storage.check_runs(tmp_path, needs_shared=False)) == {"folder of runs": "fail"}
    assert states(storage.check_cache("data cache", tmp_path)) == {"data cache": "fail"}
    monkeypatch.undo()
    for free, state in ((GIB // 2, "fail"), (5 * GIB, "warn"), (50 * GIB, "ok")):
        monkeypatch.setattr(storage.os, "statvfs", lambda path, free=free: volume(free=free))
        assert states(storage.check_cache("data cache", tmp_path)) == {"data cache": state}
    monkeypatch.setattr(storage.os, "statvfs", lambda path: volume(free=50 * GIB, free_files=3))
    assert states(storage.check_cache("data cache", tmp_path))["files, data cache"] == "warn"
    monkeypatch.setattr(storage.os, "statvfs", lambda path: volume(free=50 * GIB, flags=os.ST_NOEXEC))
    assert states(storage.check_cache("compile cache", tmp_path, is_executed=True)) == {"compile cache": "fail"}


def test_a_full_disk_is_a_line(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    monkeypatch.setattr(storage, "_WRITTEN_BYTES", 4 << 20)
    found = list(storage.check_runs(tmp_path, needs_shared=False))
    assert (found[-1].name, found[-1].state) == ("writing", FAIL)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("mounts", "kind", "shared", "state"),
    [
        ("/dev/a / ext4 rw 0 0\n", "ext4", False, "ok"),
        ("/dev/a / ext4 rw 0 0\n", "ext4", True, "warn"),
        ("/dev/a / ext4 rw 0 0\nserver:/home {here} nfs4 rw 0 0\n", "nfs4", True, "ok"),
        ("/dev/a / ext4 rw 0 0\nnone {here} tmpfs rw 0 0\n", "tmpfs", False, "warn"),
        ("garbage\n\n", "", True, "warn"),
    ],
)
def test_the_file_system(tmp_path, mounts, kind, shared, state):
    here = tmp_path / "with space"
    here.mkdir()
    listed = tmp_path / "mounts"
    listed.write_text(mounts.replace("{here}", str(here).replace(" ", "\\040")))
    found = storage.file_system(here, listed)
    assert found[0] == kind
    assert storage._check_kind(*found, needs_shared=shared).state == state


def test_the_nearest_folder_that_exists_is_found(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert storage.existing(tmp_path) == tmp_path
    assert storage.existing(tmp_path / "a" / "b") == tmp_path
    # A file is no folder, and nothing can be made below it.
    assert storage.existing(tmp_path / "file" / "a") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert storage.existing(Path("a/../b")) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage.existing(Path("~/runs")) == tmp_path


def test_the_deepest_mount_is_that_of_a_folder(tmp_path):
    listed = tmp_path / "mounts"
    listed.write_text(f"a / ext4\nb {tmp_path} nfs4\nc {tmp_path}/inner lustre\nd {tmp_path}/in tmpfs\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "link").symlink_to("inner")
    assert storage.file_system(tmp_path, listed) == ("nfs4", str(tmp_path))
    assert storage.file_system(tmp_path / "inner" / "a", listed) == ("lustre", f"{tmp_path}/inner")
    assert storage.file_system(tmp_path / "link", listed) == ("lustre", f"{tmp_path}/inner")
    # The later of two mounts in one place hides the earlier one.
    listed.write_text(listed.read_text() + f"e {tmp_path}/inner ceph\n")
    assert storage.file_system(tmp_path / "inner", listed) == ("ceph", f"{tmp_path}/inner")
    assert storage.file_system(tmp_path, tmp_path / "nowhere") == ("", "")


@pytest.mark.parametrize(
    ("speed", "locks", "apart", "expected"),
    [
        (1e9, True, 0.0, {"writing": "ok", "locks": "ok"}),
        (0.0, True, 0.0, {"writing": "warn", "locks": "ok"}),
        (1e9, False, 0.0, {"writing": "ok", "locks": "warn"}),
        (1e9, True, 60.0, {"writing": "ok", "locks": "ok", "clock": "warn"}),
        (1e9, True, -60.0, {"writing": "ok", "locks": "ok", "clock": "warn"}),
    ],
)
def test_a_slow_folder_one_without_locks_and_one_with_another_clock_are_told(
    tmp_path, monkeypatch, speed, locks, apart, expected
):
    def lock(descriptor, how):
        if not locks:
            raise OSError(errno.ENOLCK, "No locks available")

    now = storage.time.time
    monkeypatch.setattr(storage, "_WRITTEN_BYTES", 4 << 20)
    monkeypatch.setattr(storage, "_SLOW", 1e12 if speed == 0.0 else 0.0)
    monkeypatch.setattr(storage.fcntl, "flock", lock)
    monkeypatch.setattr(storage.time, "time", lambda: now() + apart)
    found = states(storage.check_runs(tmp_path, needs_shared=False))
    assert {name: state for name, state in found.items() if name in ("writing", "locks", "clock")} == expected
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_a_number_of_files_is_not_short_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.os, "statvfs", lambda path: volume(free=50 * GIB, files=0, free_files=0))
    assert states(storage.check_cache("data cache", tmp_path)) == {"data cache": "ok"}


def test_the_folder_that_was_given_is_shown_also_where_it_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.os, "statvfs", lambda path: volume(free=50 * GIB))
    (found,) = storage.check_cache("data cache", tmp_path / "new")
    assert found.text == f"{tmp_path / 'new'}: 50.0 of 100.0 GiB free"
