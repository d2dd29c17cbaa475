"""checkpoint=async_pinned: the next update waits for the copies of the device."""

from __future__ import annotations

import contextlib

import torch

from tests.checkpoint.targets import saved_by, sums
from titanlab.checkpoint import Position
from titanlab.checkpoint.store import PinnedSaver, SyncSaver


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
        "titanlab.checkpoint.writer.HostBuffer._taken", lambda buffer, size: torch.empty(size, dtype=torch.uint8)
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
