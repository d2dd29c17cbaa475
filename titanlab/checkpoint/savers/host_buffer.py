"""Host memory for copies of a rank's part of a checkpoint, kept from one save to the next."""

from __future__ import annotations

import contextlib
import errno
import mmap

import torch
from torch import Tensor

from titanlab.records.outcome import first_line


class HostBuffer:
    """Memory that is taken once and used again, because the kernel clears new pages while the training waits.

    Attributes:
        page_locked: whether devices copy into it by themselves.
    """

    def __init__(self, *, page_locked: bool = False) -> None:
        self.page_locked = page_locked
        self._memory: Tensor | None = None

    def reserve(self, size: int) -> Tensor:
        """So many bytes; what was taken before is overwritten.

        Raises:
            OSError: the host has no more memory.
        """
        if self._memory is None or len(self._memory) < size:
            # The smaller one is freed first.
            self._memory = None
            self._memory = _locked(size) if self.page_locked else _mapped(size)
        return self._memory[:size]


def _locked(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        # A failed save ends no run; an error of the device would.
        raise OSError(errno.ENOMEM, f"the host pins no {size} bytes: {first_line(error)}") from error


def _mapped(size: int) -> Tensor:
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Processes that this one forks need no copy of it. Other systems have no such advice, and a kernel may refuse it.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8)
