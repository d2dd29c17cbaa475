"""Savers of every mode: the same bytes, and a save that fails leaves the checkpoint before it."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.targets import saved_by, sums, trained
from titanlab.checkpoint import Position, Target
from titanlab.checkpoint.store import AsyncSaver, SyncSaver
from titanlab.distributed import World
from titanlab.distributed.flight_recorder import last_collectives


def test_the_bytes_are_the_same_in_every_mode(tmp_path, target):
    for name, kind in (("sync", SyncSaver), ("async", AsyncSaver)):
        saved_by(kind(target(folder=tmp_path / name)))
    assert sums(tmp_path / "sync" / "step-00000001") == sums(tmp_path / "async" / "step-00000001")


@pytest.mark.parametrize("kind", [SyncSaver, AsyncSaver])
def test_a_save_that_the_disk_refuses_leaves_the_one_before(tmp_path, target, monkeypatch, kind):
    saver = kind(target())
    saved_by(saver)

    def refuse(*given):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr("titanlab.checkpoint.blocks.os.write", refuse)
        with pytest.raises(OSError, match="No space left"):
            saved_by(saver, step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert saver.saved_step == 1
    saved_by(saver, step=3)
    assert saver.saved_step == 3


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
