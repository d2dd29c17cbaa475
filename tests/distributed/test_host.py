"""What a host has, from the driver's files or its tool, without torch."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

from titanlab.distributed import (
    Host,
    check_host,
    cores,
    gpus,
    host,
    share_of_cores,
    this_host,
    thread_count,
    thread_variables,
)
from titanlab.errors import ConfigError


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """The driver's folder, empty, on a machine without its tool."""
    folder = tmp_path / "gpus"
    folder.mkdir()
    monkeypatch.setattr(host, "_DRIVER", folder)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def add(driver: Path, *names: str) -> None:
    for place, name in enumerate(names):
        (driver / f"0000:{place:02x}:00.0").mkdir()
        text = f"Model: \t\t {name}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-{place}\nBus Type: \t PCIe\n"
        (driver / f"0000:{place:02x}:00.0" / "information").write_text(text)


def tool(driver: Path, script: str) -> None:
    program = driver.parent / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_without_a_gpu_the_cores_count(driver, monkeypatch):
    assert this_host() == Host(accelerator="cpu", device="cpu", count=cores())
    tool(driver, "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9")
    assert this_host().accelerator == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert this_host().accelerator == "cpu"


def test_gpus_are_read_from_the_driver(driver):
    add(driver, "NVIDIA H200", "NVIDIA H200")
    assert this_host() == Host(accelerator="cuda", device="NVIDIA H200", count=2)


@pytest.mark.parametrize(
    ("visible", "device", "count"),
    [
        ("0,1,2", "A", 3),
        ("1", "B", 1),
        ("2,0", "C", 2),
        (" 1 , 2 ", "B", 2),
        ("GPU-1,GPU-2", "A", 2),
        ("0,7,1", "A", 1),  # CUDA stops at the first that is not there.
        ("1,-1,0", "B", 1),
        *((hidden, "cpu", cores()) for hidden in ("", "-1", "9")),
    ],
)
def test_what_is_visible_is_what_there_is(driver, monkeypatch, visible, device, count):
    add(driver, "A", "B", "C")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert this_host() == Host(accelerator="cpu" if device == "cpu" else "cuda", device=device, count=count)


def test_where_the_driver_is_hidden_its_tool_is_asked(driver):
    tool(driver, "echo 'NVIDIA H100 80GB HBM3'; echo; echo 'NVIDIA H100 80GB HBM3'")
    assert this_host() == Host(accelerator="cuda", device="NVIDIA H100 80GB HBM3", count=2)


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1


CPU = Host(accelerator="cpu", device="cpu", count=1)
TWO = Host(accelerator="cuda", device="NVIDIA A100-SXM4-80GB", count=2)


@pytest.mark.parametrize(
    ("host", "accelerator", "device", "processes", "line"),
    [
        (TWO, "cuda", "NVIDIA A100-SXM4-80GB", 2, None),
        (TWO, "cuda", None, 1, None),
        # Another name of the same device.
        (TWO, "cuda", "NVIDIA A100 80GB SXM", 1, None),
        (TWO, "cpu", "cpu", 64, None),
        (TWO, "cuda", "NVIDIA A100-SXM4-40GB", 1, "cluster.device=NVIDIA A100-SXM4-40GB: this host has NVIDIA A100-SXM4-80GB; "),
        (TWO, "cuda", "NVIDIA A100-SXM4-80GB", 3, "world=3: this host has 2 GPUs; try world=2"),
        (CPU, "cuda", "NVIDIA H200", 1, "cluster.accelerator=cuda: this host shows no GPU; "),
    ],
)  # fmt: skip
def test_a_host_is_held_to_what_a_run_is_named_for(host, accelerator, device, processes, line):
    refused = contextlib.nullcontext() if line is None else pytest.raises(ConfigError, match=f"^{re.escape(line)}")
    with refused:
        check_host(host, accelerator=accelerator, device=device, processes=processes)


def test_a_process_may_have_one_of_several_gpus_for_itself(driver, monkeypatch):
    add(driver, *["NVIDIA H200"] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    host = this_host()
    assert (host.count, gpus()) == (1, 4)
    check_host(host, accelerator="cuda", device=None, processes=4, has_own_gpu=True)
    with pytest.raises(ConfigError, match="world=4: this host has 1 GPUs; try world=1"):
        check_host(host, accelerator="cuda", device=None, processes=4)
    # Two GPUs for each of four processes: nobody can tell which of them is whose.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(ConfigError, match="world=4: this host has 2 GPUs"):
        check_host(this_host(), accelerator="cuda", device=None, processes=4, has_own_gpu=True)


GIB = 2**30


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        (
            "0::/slurm/job_7/step_0",
            {"slurm/job_7/memory.max": 3 * GIB, "slurm/job_7/step_0/memory.max": "max"},
            3 * GIB,
        ),
        # Version 1: a number beyond all memory means no limit.
        (
            "9:cpuset:/slurm/job_7\n4:memory:/slurm/uid_1/job_7\n0::/",
            {
                "memory/slurm/uid_1/job_7/memory.limit_in_bytes": 2 * GIB,
                "memory/memory.limit_in_bytes": 9223372036854771712,
            },
            2 * GIB,
        ),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": 9223372036854771712}, None),
        ("", {}, None),
    ],
)
def test_memory_is_what_the_control_group_allows(tmp_path, lines, files, limit):
    assert host.memory_bytes(tmp_path) is None
    meminfo = f"MemTotal: {100 * 2**30} kB\nSwapTotal: 1 kB"
    files = {f"sys/fs/cgroup/{name}": value for name, value in files.items()}
    for name, text in {"proc/self/cgroup": lines, "proc/meminfo": meminfo, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert host.memory_bytes(tmp_path) == (limit or 100 * 2**40) + 1024


OMP, MKL = "OMP_NUM_THREADS", "MKL_NUM_THREADS"


@pytest.mark.parametrize(
    ("there", "given", "changed", "threads"),
    [
        ({}, None, {OMP: "4"}, 4),
        ({}, 9, {OMP: "9"}, 9),
        ({OMP: "2"}, None, {}, 2),
        ({OMP: "2"}, 9, {OMP: "9"}, 9),
        ({OMP: "5"}, None, {OMP: "4"}, 4),
        ({OMP: "3,1"}, None, {}, 3),
        # OpenMP ignores such values, and takes all cores.
        ({OMP: "0"}, None, {OMP: "4"}, 4),
        ({OMP: "many"}, None, {OMP: "4"}, 4),
        # torch takes the number of MKL.
        ({MKL: "2"}, None, {OMP: "4"}, 2),
        ({OMP: "1", MKL: "8"}, None, {MKL: "4"}, 4),
        ({OMP: "8", MKL: "8"}, 2, {OMP: "2", MKL: "2"}, 2),
    ],
)
def test_a_number_of_threads_that_is_set_stays_if_there_are_so_many_cores(there, given, changed, threads):
    assert thread_variables(there, 4, given) == changed
    assert thread_count({**there, **changed}) == threads


def test_processes_share_the_cores_of_their_job():
    assert share_of_cores(1, {}) == cores()
    assert share_of_cores(2 * cores(), {}) == 1
    # What a launcher gives to each.
    assert share_of_cores(4, {"TITANLAB_CORES": "3"}) == 3
