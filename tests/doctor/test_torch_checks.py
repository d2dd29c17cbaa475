"""What torch knows, and whether processes exchange tensors: with a torch that works, lacks, lies, or hangs."""

import sys
import time

import pytest

from tests.doctor.programs import program, states
from titanlab.doctor import software
from titanlab.doctor.software import check_all_reduce, check_torch, torch_facts

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
        ({**CPU, "cpu_bf16": True}, {"torch": "ok"}),
        ({**CPU, "cpu_bf16": False}, {"torch": "ok", "bf16": "warn"}),
        ({**CUDA, "cpu_bf16": False}, {"torch": "ok", "CUDA": "ok", "NCCL": "ok"}),
        (CUDA, {"torch": "ok", "CUDA": "ok", "NCCL": "ok"}),
        ({**CUDA, "product": 1.0}, {"torch": "ok", "CUDA": "fail", "NCCL": "ok"}),
        ({**CUDA, "nccl": False}, {"torch": "ok", "CUDA": "ok", "NCCL": "fail"}),
        ({**CUDA, "devices": [H100, {**H100, "peers": []}]}, {"torch": "ok", "CUDA": "ok", "NCCL": "warn"}),
        ({**CUDA, "devices": [H100, {**H100, "name": "A100"}]}, {"torch": "ok", "CUDA": "warn", "NCCL": "ok"}),
        ({**CUDA, "architectures": ["sm_80"]}, {"torch": "ok", "CUDA": "ok", "CUDA build": "fail", "NCCL": "ok"}),
        ({**CUDA, "architectures": ["sm_100"]}, {"torch": "ok", "CUDA": "ok", "CUDA build": "fail", "NCCL": "ok"}),
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
        ("echo '[1]'", "exit code 0"),
        ("echo 'ImportError: libcudart.so.12: cannot open' >&2; exit 1", "ImportError: libcudart.so.12: cannot open"),
        ("kill -SEGV $$", "exit code -11"),
        ("exec sleep 30", "gave no answer within 0.3 s"),
    ],
)
def test_a_torch_that_cannot_be_used_is_named(tmp_path, script, problem):
    python = program(tmp_path, "python", script)
    found, said = torch_facts(python=str(python), seconds=0.3 if "sleep" in script else 20)
    assert (found, said) == ({}, problem)
    (finding,) = check_torch(found, said)
    assert (finding.state, finding.text) == ("fail", f"cannot be used: {problem}")


@pytest.mark.parametrize(
    ("script", "state", "text"),
    [
        ("""echo '{"total": 3.0, "expected": 3.0, "seconds": 0.5}'""", "ok", "2 processes in 0.50 s"),
        ("""echo '{"total": 2.0, "expected": 3.0, "seconds": 0.5}'""", "fail", "the sum is wrong"),
        ("echo garbage", "fail", "the sum is wrong"),
        ("echo 'RuntimeError: no route to host' >&2; exit 1", "fail", "RuntimeError: no route to host"),
        ("exec sleep 30", "fail", "2 processes did not meet within 0.3 s"),
    ],
)
def test_processes_that_do_not_meet_are_named(tmp_path, script, state, text):
    python = program(tmp_path, "python", script)
    begin = time.monotonic()
    finding = check_all_reduce("gloo", 2, python=str(python), seconds=0.3 if "sleep" in script else 20)
    assert (finding.state, finding.text) == (state, text)
    assert time.monotonic() - begin < 15


@pytest.mark.full
def test_real_processes_meet_and_torch_says_what_it_is():
    found, problem = torch_facts()
    assert (found["gloo"], problem) == (True, "")
    finding = check_all_reduce("gloo", 2)
    assert finding.state == "ok", finding
    missing = check_all_reduce("gloo", 2, python=sys.executable, seconds=0.01)
    assert missing.state == "fail"


def test_the_script_needs_nothing_of_titanlab():
    assert "titanlab." not in software.SCRIPT.read_text().partition('"""\n\nfrom')[2]
