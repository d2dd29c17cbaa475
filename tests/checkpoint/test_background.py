"""checkpoint=async: training goes on while a thread writes; errors and warnings reach the main thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.targets import Gate, saved_by, sums, trained
from tests.pool import RankFailure
from titanlab.checkpoint import Position, Target, store
from titanlab.checkpoint.folders import checkpoints
from titanlab.checkpoint.store import AsyncSaver, SyncSaver
from titanlab.distributed import World


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


def test_a_save_that_is_complete_is_known_once(target):
    saver = AsyncSaver(target())
    saver.save(Position(step=1))
    saver._thread.join()
    assert saver.is_done
    saver.wait()
    assert not saver.is_done
    saver.wait()


def test_the_last_save_needs_no_thread_and_no_copy(target, monkeypatch):
    gate = Gate(monkeypatch)
    gate.opened.set()
    saver = AsyncSaver(target())
    saver.save_last(Position(step=4))
    assert gate.writes == ["MainThread"]
    assert (saver.saved_step, saver._buffer._memory) == (4, None)


def test_an_old_checkpoint_that_stays_is_reported_by_the_main_thread(target, monkeypatch):
    lines = []
    saver = AsyncSaver(target(keep=1, warn=lambda text: lines.append((threading.current_thread().name, text))))
    saved_by(saver)
    monkeypatch.setattr(store, "remove", lambda path: OSError(13, "Permission denied") if path.exists() else None)
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
    if rank == 1:
        saver._complete = lambda *given: None
    saver.save(Position(step=1))
    raise LookupError(f"rank {rank} has a planted error")


def test_an_error_of_the_training_waits_for_no_thread(pool, tmp_path):
    with pytest.raises(RankFailure, match="a planted error"):
        pool.run(2, ends_while_the_other_waits, tmp_path, limit_seconds=20)
    assert checkpoints(tmp_path) == []
