"""Limits of the host: cores, shared memory, open files, its name, network and clock."""

import resource
import socket
from pathlib import Path

import pytest

from tests.doctor.programs import program, states
from tests.doctor.volumes import GIB, volume
from titanlab.doctor import limits


def test_this_machine_can_be_read():
    checks = (limits.check_cores, limits.check_shared_memory, limits.check_ulimits, limits.check_network)
    for check in (*checks, limits.check_clock):
        assert all(each.text and each.name for each in check())


def test_the_cgroup_that_gives_less_than_the_cores(tmp_path, monkeypatch):
    (tmp_path / "job").mkdir()
    (tmp_path / "own").write_text("0::/job\n")
    (tmp_path / "job" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert limits.cpu_share(tmp_path, tmp_path / "own") == 1.5
    (tmp_path / "job" / "cpu.max").write_text("garbage")
    assert limits.cpu_share(tmp_path, tmp_path / "own") is None
    monkeypatch.setattr(limits, "cpu_share", lambda: 0.5)
    assert states(limits.check_cores())["cores"] == "warn"


@pytest.mark.parametrize(("free", "state"), [(64 << 20, "fail"), (GIB // 2, "warn"), (8 * GIB, "ok")])
def test_shared_memory(monkeypatch, free, state):
    monkeypatch.setattr(limits.os, "statvfs", lambda path: volume(free=free))
    assert states(limits.check_shared_memory()) == {"shared memory": state}
    assert states(limits.check_shared_memory(Path("/nowhere"))) == {"shared memory": "warn"}


@pytest.mark.parametrize(("files", "state"), [(512, "fail"), (1024, "warn"), (65536, "ok"), (-1, "ok")])
def test_open_files(monkeypatch, files, state):
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (files, resource.RLIM_INFINITY))
    monkeypatch.setattr(limits, "_infiniband_ports", dict)
    assert states(limits.check_ulimits())["open files"] == state


def test_a_name_that_cannot_be_resolved_and_an_interface_that_is_not_there(monkeypatch):
    def unresolved(*given):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(limits.socket, "getaddrinfo", unresolved)
    monkeypatch.setattr(limits, "_infiniband_ports", lambda: {"mlx5_0:1": "4: ACTIVE", "mlx5_1:1": "1: DOWN"})
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib9")
    found = states(limits.check_network())
    assert found == {"host name": "warn", "NCCL_SOCKET_IFNAME": "fail", "InfiniBand": "warn"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    assert "NCCL_SOCKET_IFNAME" not in states(limits.check_network())


def test_a_clock(tmp_path, monkeypatch):
    program(tmp_path, "timedatectl", "echo NTPSynchronized=no")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states(limits.check_clock()) == {"clock": "warn"}
    monkeypatch.setattr(limits.time, "time", lambda: 1000.0)
    assert states(limits.check_clock()) == {"clock": "fail"}


def findings(check):
    return {each.name: each for each in check}


@pytest.mark.parametrize(
    ("group", "files", "share"),
    [
        # Version 1 has two files, in a folder of the controller.
        ("", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ("", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("", {"cpu/cpu.cfs_quota_us": "50000"}, None),
        ("", {"cpu.max": "100000 0"}, None),
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
    assert limits.cpu_share(root, own) == share
    # Without the list of groups, the root is all there is.
    assert limits.cpu_share(root, tmp_path / "nowhere") == (share if not group.startswith("0::/a") else None)


@pytest.mark.parametrize(
    ("usable", "share", "state", "text"),
    [
        (4, None, "ok", "4 of the host's 8 may be used (affinity)"),
        (8, 8.0, "ok", "8 of the host's 8 may be used"),
        (8, 2.5, "warn", "8 of the host's 8 may be used, and the cgroup gives the time of 2.5"),
    ],
)
def test_the_cores_that_may_be_used(monkeypatch, usable, share, state, text):
    monkeypatch.setattr(limits, "cores", lambda: usable)
    monkeypatch.setattr(limits.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(limits, "cpu_share", lambda: share)
    found = findings(limits.check_cores())["cores"]
    assert (found.state, found.text) == (state, text)
    if state == "warn":
        assert "OMP_NUM_THREADS=2" in found.hint


@pytest.mark.parametrize(("threads", "told"), [("5", True), ("4", False), ("", False), ("many", False), ("-9", False)])
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_more_threads_than_cores_are_told(monkeypatch, name, threads, told):
    monkeypatch.setattr(limits, "cores", lambda: 4)
    monkeypatch.setenv(name, threads)
    assert ("threads" in states(limits.check_cores())) is told


def test_memory_that_is_not_known_is_a_warning(monkeypatch):
    monkeypatch.setattr(limits, "memory_bytes", lambda: None)
    assert states(limits.check_cores())["memory"] == "warn"
    monkeypatch.setattr(limits, "memory_bytes", lambda: 3 * GIB // 2)
    assert findings(limits.check_cores())["memory"].text == "1.5 GiB, swap and limits counted in"


def test_limits_of_memory_and_files_are_told_where_there_are_some(monkeypatch):
    unlimited = dict.fromkeys(
        (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_FSIZE, resource.RLIMIT_AS),
        resource.RLIM_INFINITY,
    )
    limited = {**unlimited, resource.RLIMIT_MEMLOCK: 1 << 20, resource.RLIMIT_FSIZE: GIB, resource.RLIMIT_AS: 4 * GIB}
    monkeypatch.setattr(limits, "_infiniband_ports", dict)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (unlimited[which], resource.RLIM_INFINITY))
    assert states(limits.check_ulimits()) == {"open files": "ok", "locked memory": "ok"}
    assert findings(limits.check_ulimits())["open files"].text == "unlimited (up to unlimited)"
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (limited[which], 65536))
    found = findings(limits.check_ulimits())
    assert {name: (each.state, each.text) for name, each in found.items()} == {
        "open files": ("ok", "unlimited (up to 65,536)"),
        # Only InfiniBand pins memory.
        "locked memory": ("ok", "1.0 MiB"),
        "size of files": ("warn", "at most 1.0 GiB"),
        "address space": ("warn", "at most 4.0 GiB of addresses"),
    }
    monkeypatch.setattr(limits, "_infiniband_ports", lambda: {"mlx5_0:1": "4: ACTIVE"})
    assert states(limits.check_ulimits())["locked memory"] == "warn"


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
    monkeypatch.setattr(limits.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    found = findings(limits.check_network())
    assert (variable in found) is bool(missing)
    if missing:
        assert (found[variable].state, found[variable].text) == ("fail", f"{value}: there is no interface {missing}")
        assert found[variable].hint == "ranks cannot meet; the host has eth0, lo"


def test_ports_of_infiniband_are_read_from_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "_INFINIBAND", tmp_path)
    assert "InfiniBand" not in states(limits.check_network())
    for port, state in (("1", "4: ACTIVE\n"), ("2", "4: ACTIVE\n")):
        (tmp_path / "mlx5_0" / "ports" / port).mkdir(parents=True)
        (tmp_path / "mlx5_0" / "ports" / port / "state").write_text(state)
    found = findings(limits.check_network())["InfiniBand"]
    assert (found.state, found.text) == ("ok", "2 ports active")
    (tmp_path / "mlx5_0" / "ports" / "2" / "state").write_bytes(b"\xff DOWN")
    found = findings(limits.check_network())["InfiniBand"]
    assert (found.state, found.text) == ("warn", "1 of 2 ports active; not: mlx5_0:2")
    assert found.hint.endswith("NCCL_IB_HCA=^mlx5_0:2")


def test_a_clock_that_is_kept_or_of_which_nothing_is_known_is_fine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states(limits.check_clock()) == {"clock": "ok"}
    program(tmp_path, "timedatectl", "echo NTPSynchronized=yes")
    assert states(limits.check_clock()) == {"clock": "ok"}
