"""Savers: the same bytes in every mode, one save at a time, and saves that fail leave the checkpoint before them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import tiny
from tests.pool import RankFailure
from titanlab.checkpoint import begun, store
from titanlab.checkpoint.contract import Target
from titanlab.checkpoint.folders import checkpoints
from titanlab.checkpoint.position import Position
from titanlab.checkpoint.savers.background import AsyncSaver
from titanlab.checkpoint.savers.blocking import NoSaver, SyncSaver
from titanlab.checkpoint.savers.host_buffer import HostBuffer
from titanlab.checkpoint.savers.pinned import PinnedSaver
from titanlab.checkpoint.schema import Async, AsyncPinned, Off, Sync
from titanlab.distributed.flight_recorder import last_collectives
from titanlab.distributed.world import World
from titanlab.errors import ConfigError
from titanlab.recipe.composition.frozen import overridden
from titanlab.recipe.recipe import from_mapping, to_mapping
from titanlab.records.identity import canonical

ALONE = World(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


def trained(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def target(tmp_path):
    def make(**given):
        model, optimizer = trained()
        made = {"folder": tmp_path, "world": ALONE, "keep": 2, **given}
        return Target(model=model, optimizer=optimizer, **made)

    return make


class Gate:
    """Lets a save write when it is opened."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self.writes = []
        real = store.write_and_publish

        def write_and_publish(*given):
            self.opened.wait(20)
            self.writes.append(threading.current_thread().name)
            real(*given)

        monkeypatch.setattr(store, "write_and_publish", write_and_publish)


def sums(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def saved_by(saver, step=1):
    saver.save(Position(step=step))
    saver.wait()


def test_a_config_names_its_saver(target):
    assert isinstance(Off().implementation(target()), NoSaver)
    assert isinstance(Sync().implementation(target()), SyncSaver)
    assert isinstance(Async().implementation(target()), AsyncSaver)


def test_the_bytes_are_the_same_in_every_mode(tmp_path, target):
    for name, kind in (("sync", SyncSaver), ("async", AsyncSaver)):
        saved_by(kind(target(folder=tmp_path / name)))
    assert sums(tmp_path / "sync" / "step-00000001") == sums(tmp_path / "async" / "step-00000001")


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


def test_memory_of_copies_is_used_again():
    buffer = HostBuffer()
    first, second, larger = buffer.reserve(100), buffer.reserve(60), buffer.reserve(5000)
    assert first.data_ptr() == second.data_ptr()
    assert (len(first), len(second), len(larger)) == (100, 60, 5000)
    assert buffer.reserve(100).data_ptr() == larger.data_ptr()


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
    monkeypatch.setattr(begun, "remove", lambda path: OSError(13, "Permission denied") if path.exists() else None)
    saved_by(saver, step=2)
    assert [(name, "step-00000001 cannot be removed: Permission denied" in text) for name, text in lines] == [
        ("MainThread", True)
    ]


def test_some_checkpoints_are_kept_for_good(tmp_path, target):
    saver = SyncSaver(target(keep=1, keep_every=4))
    for step in range(2, 12, 2):
        saved_by(saver, step=step)
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{step:08d}" for step in (4, 8, 10)]


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
    return totals, saver.saved_step, {call["group"] for call in last_collectives() if call["created"] >= began}


def test_threads_of_ranks_agree_beside_the_training(pool, tmp_path):
    told = {kind: pool.run(2, of_two, tmp_path / kind.__name__, kind) for kind in (SyncSaver, AsyncSaver)}
    for totals, step, groups in [*told[SyncSaver], *told[AsyncSaver]]:
        assert (totals, step) == ([2.0] * 20, 1)
        # The diagnosis of a hang does not see them.
        assert groups <= {"0"}
    assert len(sums(tmp_path / "AsyncSaver" / "step-00000001")) == 4
    assert sums(tmp_path / "AsyncSaver" / "step-00000001") == sums(tmp_path / "SyncSaver" / "step-00000001")


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
            patch.setattr("titanlab.checkpoint.writer.os.fsync", not_there)
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Off(every=5), r"checkpoint.every=5: checkpoint=off saves nothing"),
        (lambda: Off(minutes=5), r"checkpoint.minutes=5: checkpoint=off saves nothing"),
        (lambda: Sync(minutes=-1), r"checkpoint.minutes=-1: must not be negative"),
        (lambda: Sync(every=300, keep_every=1000), r"keep_every=1000: no multiple of checkpoint.every=300.*try 900"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_pinned_memory_is_refused_on_cpu():
    class Setting:
        accelerator = "cpu"

    with pytest.raises(ConfigError, match="checkpoint=async_pinned: pinned memory is for GPUs; try checkpoint=async"):
        AsyncPinned().check(Setting())


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
        "titanlab.checkpoint.savers.host_buffer._locked", lambda size: torch.empty(size, dtype=torch.uint8)
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


def test_a_config_of_before_there_were_kinds_saves_synchronously(tmp_path):
    config = to_mapping(tiny.recipe(tmp_path, every=3))
    for name in ("kind", "minutes", "keep_every", "last", "last_dtype"):
        config["checkpoint"].pop(name)
    made = from_mapping(config)
    assert made.checkpoint == Sync(every=3)
    assert canonical(made) == canonical(tiny.recipe(tmp_path, every=3, saves="async"))


def test_how_a_run_saves_may_change_between_its_attempts(tmp_path):
    config = to_mapping(tiny.recipe(tmp_path, every=3))
    made = overridden(config, ["checkpoint.kind=async", "checkpoint.minutes=10"], file=tmp_path / "config.yaml")
    assert made.checkpoint == Async(every=3, minutes=10.0)
