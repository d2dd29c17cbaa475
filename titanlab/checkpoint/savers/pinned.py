"""checkpoint=async_pinned: a GPU copies its states to pinned host memory, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from titanlab.checkpoint.agreement import attempted
from titanlab.checkpoint.contract import Target
from titanlab.checkpoint.savers.background import AsyncSaver
from titanlab.checkpoint.savers.host_buffer import HostBuffer
from titanlab.checkpoint.savers.saving import Planned
from titanlab.checkpoint.writer import Staged


class PinnedSaver(AsyncSaver):
    """`save` returns when the copies are queued; the next update of the model waits for them on the device."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, HostBuffer(page_locked=True))
        self._device = target.world.device
        self._stream = torch.cuda.Stream(self._device)
        self._copied: torch.cuda.Event | None = None

    def before_update(self) -> None:
        """Let the device wait for the copies; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def _staged(self, planned: Planned) -> Callable[[], Staged]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            staged, error = attempted(lambda: planned.stage(self._buffer))
            copied.record(self._stream)
        self._copied = copied

        def result() -> Staged:
            copied.synchronize()
            if staged is None:
                assert error is not None
                raise error
            return staged

        return result
