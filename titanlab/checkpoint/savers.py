"""The kinds of the group `checkpoint`: off, sync, async and async_pinned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from titanlab.checkpoint import store
from titanlab.checkpoint.contract import OnlyModel, Saver, Target
from titanlab.checkpoint.position import Position
from titanlab.checkpoint.store import PlannedSave, Plans, attempted
from titanlab.checkpoint.writer import HostBuffer, Staged


class NoSaver(Saver):
    """Saves nothing."""

    saved_step = 0

    def save(self, position: Position) -> None:
        pass

    def save_last(self, position: Position, only_model: OnlyModel | None = None) -> None:
        pass


class SyncSaver(Saver):
    """`save` returns when the checkpoint is on the disk."""

    def __init__(self, target: Target, plans: Plans | None = None) -> None:
        self._target = target
        self._plans = plans or Plans()
        self.saved_step = 0

    def save(self, position: Position) -> None:
        self.save_last(position)

    def save_last(self, position: Position, only_model: OnlyModel | None = None) -> None:
        store.save(self._target, position, plans=self._plans, only_model=only_model)
        self.saved_step = position.step


class AsyncSaver(Saver):
    """`save` returns when the states are copied.

    The threads of all ranks agree in a group of their own. Nothing waits for a thread but `wait`: if the training ends
    with an error on one rank, threads of the others may wait for that rank until their processes end.
    """

    def __init__(self, target: Target, buffer: HostBuffer | None = None) -> None:
        self._target = target
        self._plans = Plans()
        # The thread's lines for the user. The console belongs to the main thread.
        self._warnings: list[str] = []
        self._beside = replace(target, world=target.world.beside(), warn=self._warnings.append)
        self._buffer = buffer or HostBuffer()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.saved_step = 0

    @property
    def is_done(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def save(self, position: Position) -> None:
        assert self._thread is None, "the last save is under way"
        planned = store.begin(self._target, position, plans=self._plans)
        # An error of one rank goes to all of them in the thread, where they agree.
        staged = self._staged(planned)

        def complete() -> None:
            try:
                store.complete(planned, staged, self._beside)
                self.saved_step = position.step
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=complete, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        while self._warnings:
            self._target.warn(self._warnings.pop(0))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def save_last(self, position: Position, only_model: OnlyModel | None = None) -> None:
        # Without a copy, because no step follows.
        SyncSaver(self._target, self._plans).save_last(position, only_model)
        self.saved_step = position.step

    def _staged(self, planned: PlannedSave) -> Callable[[], Staged]:
        """Copy; return a function for the thread that returns the copy, or raises the error."""
        staged, error = attempted(lambda: planned.stage(self._buffer))

        def result() -> Staged:
            if staged is None:
                assert error is not None
                raise error
            return staged

        return result


class PinnedSaver(AsyncSaver):
    """`save` returns when the copies are queued; the next update of the model waits for them on the device."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, HostBuffer(page_locked=True))
        self._device = target.world.device
        self._stream = torch.cuda.Stream(self._device)
        self._copied: torch.cuda.Event | None = None

    def before_update(self) -> None:
        # The device waits for the copies; the host does not.
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def _staged(self, planned: PlannedSave) -> Callable[[], Staged]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            staged = super()._staged(planned)
            copied.record(self._stream)
        self._copied = copied

        def waited() -> Staged:
            copied.synchronize()
            return staged()

        return waited
