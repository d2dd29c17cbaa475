"""What torch knows, and whether processes exchange tensors: with a torch that works, lacks, lies, or hangs."""

import ast
import json
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.doctor.programs import program, states
from titanlab.doctor import torch_script
from titanlab.doctor.software import FACTS_SECONDS, check_all_reduce, check_torch, run_script

CPU = {"version": "2.13.0+cpu", "cuda": None, "hip": None, "cuda_available": False, "distributed": True, "gloo": True}
CPU |= {"nccl": False, "threads": 2, "devices": [], "architectures": []}
H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.2, "capability": [9, 0], "peers": [1]}
CUDA = {**CPU, "cuda": "12.8", "cuda_available": True, "nccl": True, "nccl_version": "2.27.3", "product": 64.0**3}
CUDA |= {"devices": [H100, {**H100, "peers": [0]}], "architectures": ["sm_80", "sm_90"]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (CPU, {"torch": "ok"}),
        ({**CPU, "gloo": False}, {"torch": "ok", "gloo": "fail"}),
        ({**CPU, "cpu_bf16": False}, {"torch": "ok", "bf16": "warn"}),
        ({**CUDA, "cpu_bf16": False}, {"torch": "ok", "CUDA": "ok", "NCCL": "ok"}),
        (CUDA, {"torch": "ok", "CUDA": "ok", "NCCL": "ok"}),
        ({**CUDA, "product": 1.0}, {"torch": "ok", "CUDA": "fail", "NCCL": "ok"}),
        ({**CUDA, "nccl": False}, {"torch": "ok", "CUDA": "ok", "NCCL": "fail"}),
        ({**CUDA, "devices": [H100, {**H100, "peers": []}]}, {"torch": "ok", "CUDA": "ok", "NCCL": "warn"}),
        ({**CUDA, "devices": [H100, {**H100, "name": "A100"}]}, {"torch": "ok", "CUDA": "warn", "NCCL": "ok"}),
        ({**CUDA, "architectures": ["sm_80"]}, {"torch": "ok", "CUDA": "ok", "CUDA build": "fail", "NCCL": "ok"}),
        ({**CUDA, "architectures": ["sm_100", "sm_90a"]}, {"torch": "ok", "CUDA": "ok", "NCCL": "ok"}),
        ({**CUDA, "architectures": ["compute_80"]}, {"torch": "ok", "CUDA": "ok", "NCCL": "ok"}),
    ],
)  # fmt: skip
def test_the_lines_about_torch(changes, expected):
    assert states(check_torch(changes, "")) == expected


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo garbage", "exit code 0"),
        ("echo 'ImportError: libcudart.so.12: cannot open' >&2; exit 1", "ImportError: libcudart.so.12: cannot open"),
        ("kill -SEGV $$", "exit code -11"),
        ("exec sleep 120", "gave no answer within 0.3 s"),
    ],
)
def test_a_torch_that_cannot_be_used_is_named(tmp_path, script, problem):
    python = program(tmp_path, "python", script)
    found, said = run_script("facts", python=str(python), seconds=0.3 if "sleep" in script else 20)
    assert (found, said) == ({}, problem)
    (finding,) = check_torch(found, said)
    assert (finding.state, finding.text) == ("fail", f"cannot be used: {problem}")


@pytest.mark.parametrize(
    ("script", "state", "text"),
    [
        ("""echo '{"totals": [3.0, 3.0], "seconds": 0.5}'""", "ok", "2 processes in 0.50 s"),
        ("""echo '{"totals": [3.0, 1.0], "seconds": 0.5}'""", "fail", "the sum is wrong"),
        ("echo 'RuntimeError: no route to host' >&2; exit 1", "fail", "RuntimeError: no route to host"),
        ("exec sleep 120", "fail", "2 processes did not meet within 0.3 s"),
    ],
)
def test_processes_that_do_not_meet_are_named(tmp_path, script, state, text):
    python = program(tmp_path, "python", script)
    begin = time.monotonic()
    finding = check_all_reduce("gloo", 2, python=str(python), seconds=0.3 if "sleep" in script else 20)
    assert (finding.state, finding.text) == (state, text)
    assert time.monotonic() - begin < 60


@pytest.mark.full
def test_real_processes_meet_and_torch_says_what_it_is():
    found, problem = run_script("facts", seconds=FACTS_SECONDS)
    assert (found["gloo"], problem) == (True, "")
    finding = check_all_reduce("gloo", 2)
    assert finding.state == "ok", finding
    missing = check_all_reduce("gloo", 2, python=sys.executable, seconds=0.01)
    assert missing.state == "fail"


def test_it_needs_nothing_of_titanlab():
    """It runs with a torch that titanlab cannot use."""
    tree = ast.parse(Path(torch_script.__file__).read_text())
    imports = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    imports += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in imports if name.startswith("titanlab")]


def test_facts_are_values_of_json():
    facts = torch_script.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["version"] == str(torch.__version__)
    assert facts["distributed"] is True


def test_without_distributed_there_is_no_backend(monkeypatch):
    """A torch that was built without it has none of its functions."""
    monkeypatch.setattr(dist, "is_available", lambda: False)
    for name in ("is_gloo_available", "is_nccl_available"):
        monkeypatch.delattr(dist, name)
    facts = torch_script.facts()
    assert (facts["distributed"], facts["gloo"], facts["nccl"]) == (False, False, False)


def test_devices_are_described(monkeypatch):
    class Properties:
        name, total_memory, major, minor = "H", 80 * 2**30, 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} == {0, 2})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    facts = torch_script.facts()
    assert facts["devices"][0] == {"name": "H", "memory_gib": 80.0, "capability": [9, 0], "peers": [2]}
    assert [device["peers"] for device in facts["devices"]] == [[2], [], [0]]
    assert (facts["nccl_version"], facts["product"]) == ("2.30.1", 64.0**3)
