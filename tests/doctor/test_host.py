"""What the host gives: cores, memory, open files, its name; folders of runs and caches."""

import errno
import os
import resource
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from tests.doctor.programs import GIB, states, volume
from titanlab.doctor import host
from titanlab.system import FAIL


@pytest.fixture(autouse=True)
def _little_is_written(monkeypatch):
    monkeypatch.setattr(host, "_WRITTEN_BYTES", 4 << 20)


def findings(check):
    return {each.name: each for each in check}


def test_this_machine_can_be_read():
    for check in (host.check_cores, host.check_shared_memory, host.check_ulimits, host.check_network):
        assert all(each.text and each.name for each in check())


@pytest.mark.parametrize(("free", "state"), [(64 << 20, "fail"), (GIB // 2, "warn"), (8 * GIB, "ok")])
def test_shared_memory(monkeypatch, free, state):
    monkeypatch.setattr(host.os, "statvfs", lambda path: volume(free=free))
    assert states(host.check_shared_memory()) == {"shared memory": state}
    assert states(host.check_shared_memory(Path("/nowhere"))) == {"shared memory": "warn"}


def test_a_name_that_cannot_be_resolved(monkeypatch):
    def unresolved(*given):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(host.socket, "getaddrinfo", unresolved)
    assert states(host.check_network())["host name"] == "warn"


@pytest.mark.parametrize(
    ("usable", "memory", "text", "found"),
    [
        (4, None, "4 of the host's 8 may be used (affinity)", ("warn", "is not known")),
        (8, 3 * GIB // 2, "8 of the host's 8 may be used", ("ok", "1.5 GiB, swap and limits counted in")),
    ],
)
def test_the_cores_and_the_memory_that_may_be_used(monkeypatch, usable, memory, text, found):
    monkeypatch.setattr(host, "cores", lambda: usable)
    monkeypatch.setattr(host.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(host, "memory_bytes", lambda: memory)
    told = findings(host.check_cores())
    assert (told["cores"].state, told["cores"].text) == ("ok", text)
    assert (told["memory"].state, told["memory"].text) == found


@pytest.mark.parametrize(("threads", "told"), [("5", True), ("4", False), ("", False), ("many", False), ("-9", False)])
def test_more_threads_than_cores_are_told(monkeypatch, threads, told):
    monkeypatch.setattr(host, "cores", lambda: 4)
    monkeypatch.setenv("MKL_NUM_THREADS", threads)
    assert ("threads" in states(host.check_cores())) is told


def test_limits_of_memory_and_files_are_told_where_there_are_some(monkeypatch):
    unlimited = dict.fromkeys(
        (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_FSIZE, resource.RLIMIT_AS),
        resource.RLIM_INFINITY,
    )
    limited = {**unlimited, resource.RLIMIT_MEMLOCK: 1 << 20, resource.RLIMIT_FSIZE: GIB, resource.RLIMIT_AS: 4 * GIB}
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (unlimited[which], resource.RLIM_INFINITY))
    assert states(host.check_ulimits()) == {"open files": "ok", "locked memory": "ok"}
    assert findings(host.check_ulimits())["open files"].text == "unlimited (up to unlimited)"
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (limited[which], 65536))
    found = findings(host.check_ulimits())
    assert {name: (each.state, each.text) for name, each in found.items()} == {
        "open files": ("ok", "unlimited (up to 65,536)"),
        "locked memory": ("ok", "1.0 MiB; InfiniBand needs ulimit -l unlimited"),
        "size of files": ("warn", "at most 1.0 GiB"),
        "address space": ("warn", "at most 4.0 GiB of addresses"),
    }
    for files, state in ((512, "fail"), (1024, "warn"), (65536, "ok")):
        limited[resource.RLIMIT_NOFILE] = files
        assert states(host.check_ulimits())["open files"] == state


def test_folders_that_are_bad(tmp_path, monkeypatch):
    monkeypatch.setattr(host.os, "access", lambda path, mode: False)
    assert states(host.check_runs(tmp_path, needs_shared=False)) == {"folder of runs": "fail"}
    assert states(host.check_cache("data cache", tmp_path)) == {"data cache": "fail"}
    monkeypatch.undo()
    for free, state in ((GIB // 2, "fail"), (5 * GIB, "warn"), (50 * GIB, "ok")):
        monkeypatch.setattr(host.os, "statvfs", lambda path, free=free: volume(free=free))
        assert states(host.check_cache("data cache", tmp_path)) == {"data cache": state}
    # The folder that was given is shown, also where it does not exist.
    (found,) = host.check_cache("data cache", tmp_path / "new")
    assert found.text == f"{tmp_path / 'new'}: 50.0 of 100.0 GiB free"
    # Some file systems have no fixed number of files.
    monkeypatch.setattr(host.os, "statvfs", lambda path: volume(free=50 * GIB, files=0, free_files=0))
    assert states(host.check_cache("data cache", tmp_path)) == {"data cache": "ok"}
    monkeypatch.setattr(host.os, "statvfs", lambda path: volume(free=50 * GIB, free_files=3))
    assert states(host.check_cache("data cache", tmp_path))["files, data cache"] == "warn"
    monkeypatch.setattr(host.os, "statvfs", lambda path: volume(free=50 * GIB, flags=os.ST_NOEXEC))
    assert states(host.check_cache("compile cache", tmp_path, is_executed=True)) == {"compile cache": "fail"}


def test_a_full_disk_is_a_line(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host.os, "fsync", full)
    found = list(host.check_runs(tmp_path, needs_shared=False))
    assert (found[-1].name, found[-1].state) == ("writing", FAIL)
    assert os.listdir(tmp_path) == []


Mount = namedtuple("Mount", "fstype mountpoint")


@pytest.mark.parametrize(
    ("kinds", "shared", "state"),
    [
        (["ext4"], False, "ok"),
        (["ext4"], True, "warn"),
        (["ext4", "nfs4"], True, "ok"),
        (["ext4", "tmpfs"], False, "warn"),
        ([], True, "warn"),
    ],
)
def test_the_file_system(tmp_path, monkeypatch, kinds, shared, state):
    mounts = [Mount(kind, place) for kind, place in zip(kinds, ("/", str(tmp_path)), strict=False)]
    monkeypatch.setattr(host.psutil, "disk_partitions", lambda **given: mounts)
    assert states(host.check_runs(tmp_path, needs_shared=shared))["file system"] == state


@pytest.mark.parametrize(
    ("speed", "locks", "apart", "expected"),
    [
        (1e9, True, 0.0, {"writing": "ok", "locks": "ok"}),
        (0.0, True, 0.0, {"writing": "warn", "locks": "ok"}),
        (1e9, False, 0.0, {"writing": "ok", "locks": "warn"}),
        (1e9, True, 60.0, {"writing": "ok", "locks": "ok", "clock": "warn"}),
    ],
)
def test_a_slow_folder_one_without_locks_and_one_with_another_clock_are_told(
    tmp_path, monkeypatch, speed, locks, apart, expected
):
    def lock(descriptor, how):
        if not locks:
            raise OSError(errno.ENOLCK, "No locks available")

    now = host.time.time
    monkeypatch.setattr(host, "_SLOW", 1e12 if speed == 0.0 else 0.0)
    monkeypatch.setattr(host.fcntl, "flock", lock)
    monkeypatch.setattr(host.time, "time", lambda: now() + apart)
    found = states(host.check_runs(tmp_path / "not" / "made", needs_shared=False))
    assert {name: state for name, state in found.items() if name in ("writing", "locks", "clock")} == expected
    assert {"folder of runs", "file system"} <= set(found)
    assert os.listdir(tmp_path) == []
