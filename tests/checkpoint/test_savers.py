"""Savers of every kind: the same bytes, what waits for what, and a save that fails leaves the checkpoint before it."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.targets import Gate, saved_by, sums, trained
from tests.pool import RankFailure
from titanlab.checkpoint import Position, Target, saving
from titanlab.checkpoint.folders import checkpoints
from titanlab.checkpoint.saving import AsyncSaver, HostBuffer, PinnedSaver, SyncSaver
from titanlab.distributed import World
from titanlab.distributed.traffic import last_collectives


def test_the_training_goes_on_while_a_copy_is_written(tmp_path, target, monkeypatch):
    saved_by(SyncSaver(target(folder=tmp_path / "before")))
    gate = Gate(monkeypatch)
    aim = target()
    saver = AsyncSaver(aim)
    saver.save(Position(step=1))
    assert not saver.is_done
    assert checkpoints(tmp_path) == []
    with torch.no_grad():
        aim.model.weight.zero_()
    torch.rand(7)
    gate.opened.set()
    saver.wait()
    assert gate.writes == ["checkpoint"]
    assert saver.saved_step == 1
    assert sums(tmp_path / "step-00000001") == sums(tmp_path / "before" / "step-00000001")


def test_an_old_checkpoint_that_stays_is_reported_by_the_main_thread(target, monkeypatch):
    lines = []
    saver = AsyncSaver(target(keep=1, warn=lambda text: lines.append((threading.current_thread().name, text))))
    saved_by(saver)
    monkeypatch.setattr(saving, "remove", lambda path: OSError(13, "Permission denied") if path.exists() else None)
    saved_by(saver, step=2)
    assert [(name, "step-00000001 cannot be removed: Permission denied" in text) for name, text in lines] == [
        ("MainThread", True)
    ]


def not_there(*given):
    Path("/dev/full/x").read_bytes()


def refused_on_one(folder, failing, stages):
    """As one of two ranks: an asynchronous save that one of them cannot stage or write."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = World(rank=rank, world=2, local_rank=rank, device=torch.device("cpu"))
    model, optimizer = trained()
    saver = AsyncSaver(Target(folder=folder, model=model, optimizer=optimizer, world=world, keep=2))
    with pytest.MonkeyPatch.context() as patch:
        if rank == failing and stages:
            patch.setattr(saver._buffer, "reserve", not_there)
        elif rank == failing:
            patch.setattr("os.fsync", not_there)
        saver.save(Position(step=1))
        try:
            saver.wait()
        except NotADirectoryError as error:
            return type(error).__name__, saver.saved_step
    return "saved", saver.saved_step


@pytest.mark.parametrize(("failing", "stages"), [(0, False), (1, False), (1, True)])
def test_a_save_fails_on_all_ranks_or_on_none(pool, tmp_path, failing, stages):
    assert pool.run(2, refused_on_one, tmp_path, failing, stages) == [("NotADirectoryError", 0)] * 2
    assert list(tmp_path.iterdir()) == []


def ends_while_the_other_waits(folder):
    """As one of two ranks: rank 1 ends with an error, while the thread of rank 0 waits for it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = World(rank=rank, world=2, local_rank=rank, device=torch.device("cpu"))
    model, optimizer = trained()
    saver = AsyncSaver(Target(folder=folder, model=model, optimizer=optimizer, world=world, keep=2))
    if rank == 0:
        saver.save(Position(step=1))
    else:
        # Without the thread that writes.
        saving.begin(saver._target, Position(step=1), saver._plans)
    raise LookupError(f"rank {rank} has a planted error")


def test_an_error_of_the_training_waits_for_no_thread(pool, tmp_path):
    with pytest.raises(RankFailure, match="a planted error"):
        pool.run(2, ends_while_the_other_waits, tmp_path, limit_seconds=60)
    assert checkpoints(tmp_path) == []


def of_two(folder, kind):
    """As one of two ranks: save while the other group has a collective that is not complete; see what is recorded."""
    # The process may have had other groups before, and the recorder keeps what they have called.
    began = time.time()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = World(rank=rank, world=2, local_rank=rank, device=torch.device("cpu"))
    model, optimizer = trained()
    saver = kind(Target(folder=folder, model=model, optimizer=optimizer, world=world, keep=2))
    saver.save(Position(step=1))
    # Collectives of the training, while threads agree beside them.
    totals = [float(world.sum(torch.ones(1))) for _ in range(20)]
    saver.wait()
    return totals, saver.saved_step, {call.group for call in last_collectives() if call.created >= began}


def test_threads_of_ranks_agree_beside_the_training(pool, tmp_path):
    told = {kind: pool.run(2, of_two, tmp_path / kind.__name__, kind) for kind in (SyncSaver, AsyncSaver)}
    for totals, step, groups in [*told[SyncSaver], *told[AsyncSaver]]:
        assert (totals, step) == ([2.0] * 20, 1)
        # The diagnosis of a hang does not see them.
        assert groups <= {"0"}
    assert len(sums(tmp_path / "AsyncSaver" / "step-00000001")) == 4
    assert sums(tmp_path / "AsyncSaver" / "step-00000001") == sums(tmp_path / "SyncSaver" / "step-00000001")


class Device:
    """A stream and an event in one, which note the order in which they are used."""

    def __init__(self, notes):
        self._notes = notes

    def __getattr__(self, name):
        return lambda *given: self._notes.append(name)


def test_the_next_update_waits_for_a_device_that_copies(tmp_path, target, monkeypatch):
    """On a device that is not there; with a real one: tests/test_gpu.py."""
    notes = []
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *given: Device(notes))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(
        "titanlab.checkpoint.saving.HostBuffer._taken", lambda buffer, size: torch.empty(size, dtype=torch.uint8)
    )
    saver = PinnedSaver(target())
    saver.before_update()
    saver.save(Position(step=1))
    saver.before_update()
    saver.before_update()
    saver.wait()
    assert sorted(notes) == ["record", "synchronize", "wait_event", "wait_stream"]
    assert notes[0] == "wait_stream"
    saved_by(SyncSaver(target(folder=tmp_path / "sync")))
    assert sums(tmp_path / "step-00000001") == sums(tmp_path / "sync" / "step-00000001")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, memory can be pinned")
def test_a_host_that_pins_no_memory_is_a_save_that_fails():
    with pytest.raises(OSError, match="the host pins no 100 bytes"):
        HostBuffer(page_locked=True).reserve(100)
