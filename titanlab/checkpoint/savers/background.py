"""checkpoint=async: the training copies its states to host memory, and a thread of each rank writes the copy."""

from __future__ import annotations

import threading
from collections.abc import Callable

from titanlab.checkpoint import store
from titanlab.checkpoint.agreement import attempted
from titanlab.checkpoint.begun import Begun
from titanlab.checkpoint.contract import OnlyModel, Saver, Target
from titanlab.checkpoint.position import Position
from titanlab.checkpoint.savers.blocking import SyncSaver
from titanlab.checkpoint.savers.host_buffer import HostBuffer
from titanlab.checkpoint.savers.saving import Planned, Plans
from titanlab.checkpoint.writer import Staged


class AsyncSaver(Saver):
    """`save` returns when the states are copied.

    The threads of all ranks agree in a group of their own. Nothing waits for a thread but `wait`: if the training ends
    with an error on one rank, threads of the others may wait for that rank until their processes end.
    """

    def __init__(self, target: Target, buffer: HostBuffer | None = None) -> None:
        self._target = target
        self._plans = Plans()
        self._beside = target.world.beside()
        self._buffer = buffer or HostBuffer()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # The thread's lines for the user. The console belongs to the main thread.
        self._warnings: list[str] = []
        self.saved_step = 0

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended, and nothing has waited for it yet."""
        return self._thread is not None and not self._thread.is_alive()

    def save(self, position: Position) -> None:
        """Plan with all ranks, copy, and start the thread."""
        assert self._thread is None, "the last save is under way"
        target = self._target
        begun = store.begin(
            target.folder,
            position,
            model=target.model,
            optimizer=target.optimizer,
            world=target.world,
            plans=self._plans,
            recipe=target.recipe,
        )
        # An error of one rank goes to all of them in the thread, where they agree.
        staged = self._staged(begun.planned)
        self._thread = threading.Thread(
            target=self._complete, args=(begun, staged, position.step), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the thread, and raise its error."""
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
        """Without a copy, because no step follows."""
        SyncSaver(self._target, self._plans).save_last(position, only_model)
        self.saved_step = position.step

    def before_update(self) -> None:
        """The copy was complete when `save` returned."""

    def _staged(self, planned: Planned) -> Callable[[], Staged]:
        """Copy; return a function for the thread that returns the copy, or raises the error."""
        staged, error = attempted(lambda: planned.stage(self._buffer))

        def result() -> Staged:
            if staged is None:
                assert error is not None
                raise error
            return staged

        return result

    def _complete(self, begun: Begun, staged: Callable[[], Staged], step: int) -> None:
        target = self._target
        try:
            store.complete(
                begun,
                staged,
                self._beside,
                keep=target.keep,
                keep_every=target.keep_every,
                warn=self._warnings.append,
                saved=target.saved,
            )
            self.saved_step = step
        except BaseException as error:
            self._error = error
