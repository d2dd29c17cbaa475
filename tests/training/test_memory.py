"""Peak memory of a rank: the process's on a CPU, the allocator's on a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from titanlab.costs import meter
from titanlab.train import totals as module
from titanlab.train.totals import memory, peak_memory_gib

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def on_gpu(monkeypatch):
    """A GPU of 80 GiB, as torch describes it."""
    stats = {
        "active_bytes.all.peak": 20 * 2**30,
        "active_bytes.all.current": 1,
        "reserved_bytes.all.peak": 40 * 2**30,
        "reserved_bytes.all.current": 1,
        "num_alloc_retries": 3,
        "num_ooms": 1,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: stats["reserved_bytes.all.peak"])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30), raising=False
    )


def test_memory_of_a_process():
    ((name, gib),) = memory(CPU).items()
    assert name == "memory/max_resident(GiB)"
    assert 0.01 < gib < 100


def test_linux_counts_resident_memory_in_kibibytes(monkeypatch):
    used = SimpleNamespace(ru_maxrss=3 * 2**19)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(module, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: used))
    assert peak_memory_gib(CPU) == 1.5


def test_memory_of_a_gpu_is_the_peak_of_its_allocator(on_gpu):
    assert memory(GPU) == {
        meter.MEMORY_ACTIVE: 20.0,
        "memory/max_active(%)": 25.0,
        meter.MEMORY_RESERVED: 40.0,
        "memory/max_reserved(%)": 50.0,
        "memory/num_alloc_retries": 3,
        "memory/num_ooms": 1,
    }
    assert peak_memory_gib(GPU) == 40.0
