"""Limits of the host, folders of runs and caches, and packages."""

import os
import resource
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from tests.doctor.programs import program, states
from titanlab.doctor import limits, software, storage
from titanlab.terminal.finding import FAIL

GIB = 1 << 30


def volume(*, free, size=100 * GIB, files=1000, free_files=100_000, flags=0):
    Volume = namedtuple("Volume", "f_bavail f_frsize f_blocks f_files f_favail f_flag")
    return Volume(free // 512, 512, size // 512, files, free_files, flags)


def test_this_machine_can_be_read():
    checks = (limits.check_cores, limits.check_shared_memory, limits.check_ulimits, limits.check_network)
    for check in (*checks, limits.check_clock, software.check_python, software.check_code, software.check_wandb):
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


def test_packages_that_differ_are_missing_or_are_too_old(monkeypatch):
    tested = software.tested_versions()
    assert tested["torch"].startswith("2.")
    installed = {"torch": "2.10.0+cu128", "numpy": tested["numpy"], "PyYAML": tested["pyyaml"]}
    monkeypatch.setattr(software, "versions", lambda names: {k: v for k, v in installed.items() if k in names})
    found = {each.name: each for each in software.check_python()}
    assert found["torch"].state == found["pandas"].state == FAIL
    assert found["torch"].text == "2.10.0+cu128 is older than 2.11"
    assert found["packages"].text == f"torch 2.10.0+cu128 (tested: {tested['torch']})"


@pytest.mark.parametrize(
    ("environ", "state", "text"),
    [
        ({"WANDB_API_KEY": "secret"}, "ok", "an API key is there"),
        ({"WANDB_MODE": "offline"}, "ok", "WANDB_MODE=offline: files"),
        ({"WANDB_MODE": "disabled"}, "warn", "WANDB_MODE=disabled"),
        ({"HOME": "/nowhere"}, "ok", "no API key"),
    ],
)
def test_wandb(environ, state, text):
    (finding,) = software.check_wandb(environ)
    assert finding.state == state
    assert finding.text.startswith(text)
    assert "secret" not in finding.text
