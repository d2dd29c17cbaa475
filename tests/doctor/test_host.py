"""What the host gives: cores, memory, open files, its name, network and clock; folders of runs and caches."""

import errno
import os
import resource
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from tests.doctor.programs import GIB, program, states, volume
from titanlab.doctor import host
from titanlab.system import FAIL


@pytest.fixture(autouse=True)
def _little_is_written(monkeypatch):
    monkeypatch.setattr(host, "_WRITTEN_BYTES", 4 << 20)


def findings(check):
    return {each.name: each for each in check}


def test_this_machine_can_be_read():
    checks = (host.check_cores, host.check_shared_memory, host.check_ulimits, host.check_network)
    for check in (*checks, host.check_clock):
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
    ("answer", "now", "state"), [("no", None, "warn"), ("yes", None, "ok"), (None, None, "ok"), ("yes", 1000.0, "fail")]
)
def test_a_clock(tmp_path, monkeypatch, answer, now, state):
    if answer is not None:
        program(tmp_path, "timedatectl", f"echo NTPSynchronized={answer}")
    monkeypatch.setenv("PATH", str(tmp_path))
    if now is not None:
        monkeypatch.setattr(host.time, "time", lambda: now)
    assert states(host.check_clock()) == {"clock": state}


@pytest.mark.parametrize(
    ("group", "files", "share"),
    [
        # Version 1 has two files, in a folder of the controller.
        ("", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ("", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("", {"cpu/cpu.cfs_quota_us": "50000"}, None),
        ("", {"cpu.max": "100000 0"}, None),
        ("", {"cpu.max": "garbage"}, None),
        # The least of all groups above this one counts.
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000"}, 2.0),
        # A group above the root is not seen from here.
        ("0::/../..", {"cpu.max": "400000 100000"}, 4.0),
        ("no colons", {"cpu.max": "400000 100000"}, 4.0),
        ("", {}, None),
    ],
)
def test_the_share_of_a_cgroup_is_the_least_that_is_known(tmp_path, group, files, share):
    root = tmp_path / "groups"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    own = tmp_path / "own"
    own.write_text(group)
    assert host.cpu_share(root, own) == share
    # Without the list of groups, the root is all there is.
    assert host.cpu_share(root, tmp_path / "nowhere") == (share if not group.startswith("0::/a") else None)


@pytest.mark.parametrize(
    ("usable", "share", "state", "text"),
    [
        (4, None, "ok", "4 of the host's 8 may be used (affinity)"),
        (8, 8.0, "ok", "8 of the host's 8 may be used"),
        (8, 2.5, "warn", "8 of the host's 8 may be used, and the cgroup gives the time of 2.5"),
    ],
)
def test_the_cores_that_may_be_used(monkeypatch, usable, share, state, text):
    monkeypatch.setattr(host, "cores", lambda: usable)
    monkeypatch.setattr(host.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(host, "cpu_share", lambda: share)
    monkeypatch.setattr(host, "memory_bytes", lambda: 3 * GIB // 2 if share else None)
    found = findings(host.check_cores())
    assert (found["cores"].state, found["cores"].text) == (state, text)
    if state == "warn":
        assert "OMP_NUM_THREADS=2" in found["cores"].hint
    memory = ("ok", "1.5 GiB, swap and limits counted in") if share else ("warn", "is not known")
    assert (found["memory"].state, found["memory"].text) == memory


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
    monkeypatch.setattr(host, "_infiniband_ports", dict)
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (unlimited[which], resource.RLIM_INFINITY))
    assert states(host.check_ulimits()) == {"open files": "ok", "locked memory": "ok"}
    assert findings(host.check_ulimits())["open files"].text == "unlimited (up to unlimited)"
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (limited[which], 65536))
    found = findings(host.check_ulimits())
    assert {name: (each.state, each.text) for name, each in found.items()} == {
        "open files": ("ok", "unlimited (up to 65,536)"),
        # Only InfiniBand pins memory.
        "locked memory": ("ok", "1.0 MiB"),
        "size of files": ("warn", "at most 1.0 GiB"),
        "address space": ("warn", "at most 4.0 GiB of addresses"),
    }
    monkeypatch.setattr(host, "_infiniband_ports", lambda: {"mlx5_0:1": "4: ACTIVE"})
    assert states(host.check_ulimits())["locked memory"] == "warn"
    for files, state in ((512, "fail"), (1024, "warn"), (65536, "ok")):
        limited[resource.RLIMIT_NOFILE] = files
        assert states(host.check_ulimits())["open files"] == state


@pytest.mark.parametrize(
    ("variable", "value", "missing"),
    [
        # NCCL reads the beginning of a name, unless = stands before it.
        ("NCCL_SOCKET_IFNAME", "eth", ""),
        ("NCCL_SOCKET_IFNAME", "=eth", "eth"),
        ("NCCL_SOCKET_IFNAME", "=eth0,eth1", "eth1"),
        ("NCCL_SOCKET_IFNAME", "^lo", ""),
        ("GLOO_SOCKET_IFNAME", "eth", "eth"),
        ("GLOO_SOCKET_IFNAME", "eth0", ""),
        ("TP_SOCKET_IFNAME", "a,eth0,b", "a, b"),
        ("TP_SOCKET_IFNAME", "", ""),
        ("TP_SOCKET_IFNAME", ",", ""),
    ],
)
def test_interfaces_are_those_that_the_library_would_take(monkeypatch, variable, value, missing):
    monkeypatch.setattr(host.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    found = findings(host.check_network())
    assert (variable in found) is bool(missing)
    if missing:
        assert (found[variable].state, found[variable].text) == ("fail", f"{value}: there is no interface {missing}")
        assert found[variable].hint == "ranks cannot meet; the host has eth0, lo"


def test_ports_of_infiniband_are_read_from_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_INFINIBAND", tmp_path)
    assert "InfiniBand" not in states(host.check_network())
    for port, state in (("1", "4: ACTIVE\n"), ("2", "4: ACTIVE\n")):
        (tmp_path / "mlx5_0" / "ports" / port).mkdir(parents=True)
        (tmp_path / "mlx5_0" / "ports" / port / "state").write_text(state)
    found = findings(host.check_network())["InfiniBand"]
    assert (found.state, found.text) == ("ok", "2 ports active")
    (tmp_path / "mlx5_0" / "ports" / "2" / "state").write_bytes(b"\xff DOWN")
    found = findings(host.check_network())["InfiniBand"]
    assert (found.state, found.text) == ("warn", "1 of 2 ports active; not: mlx5_0:2")
    assert found.hint.endswith("NCCL_IB_HCA=^mlx5_0:2")


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
        (1e9, True, -60.0, {"writing": "ok", "locks": "ok", "clock": "warn"}),
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
