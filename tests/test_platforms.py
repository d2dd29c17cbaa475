"""docs/terminal.md says what a system without Linux's /proc and prctl does without: here both are taken away."""

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from titanlab.distributed import hang, host
from titanlab.launch.rank import fork
from titanlab.records import provenance
from titanlab.system import born_at, process_state
from titanlab.techniques.profiler import held
from titanlab.techniques.tracker import wandb
from titanlab.train import totals


@pytest.fixture
def no_proc(monkeypatch):
    """A system without /proc and /sys."""
    read_text, exists = Path.read_text, Path.exists

    def is_linux(path):
        return str(path).startswith(("/proc", "/sys"))

    def read(path, *given, **more):
        if is_linux(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return read_text(path, *given, **more)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(Path, "exists", lambda path, **more: not is_linux(path) and exists(path, **more))


@pytest.fixture
def darwin(monkeypatch):
    """What the modules see of `sys` and `platform` on a Mac."""
    seen = SimpleNamespace(platform="darwin", byteorder="little")
    for module in (fork, wandb, held):
        monkeypatch.setattr(module, "sys", seen)


def test_what_linux_alone_tells_is_not_known(no_proc):
    assert host.memory_bytes() is None
    assert process_state(os.getpid()) is None
    assert not hang.main_thread_is_busy()
    assert totals._queued_seconds() == 0.0
    assert provenance._cpu_model() in (platform.processor(), platform.machine())


def test_processes_are_told_by_their_number(no_proc):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert born_at(process.pid) == 0
        process.stdin.close()
        process.wait()
    assert born_at(process.pid) is None


def test_nobody_adopts_and_no_filter_is_set(darwin):
    with fork.adopting() as can:
        assert not can
    fork.end_with_parent()
    before = signal.getsignal(signal.SIGUSR2)
    try:
        assert not wandb.ignore_signals([signal.SIGUSR2])
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_memory_is_counted_in_bytes(darwin, monkeypatch):
    monkeypatch.setattr(held, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: PEAK))
    assert totals.peak_memory_gib(SimpleNamespace(type="cpu")) == 1.5


PEAK = SimpleNamespace(ru_maxrss=3 * 2**29)


def test_cores_without_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert host.cores() == os.cpu_count()
