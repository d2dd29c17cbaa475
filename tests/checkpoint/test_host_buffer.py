"""Host memory for copies: it is used again, and memory that cannot be pinned is a save that fails."""

from __future__ import annotations

import pytest
import torch

from titanlab.checkpoint.writer import HostBuffer


def test_memory_of_copies_is_used_again():
    buffer = HostBuffer()
    first, second, larger = buffer.reserve(100), buffer.reserve(60), buffer.reserve(5000)
    assert first.data_ptr() == second.data_ptr()
    assert (len(first), len(second), len(larger)) == (100, 60, 5000)
    assert buffer.reserve(100).data_ptr() == larger.data_ptr()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, memory can be pinned")
def test_a_host_that_pins_no_memory_is_a_save_that_fails():
    with pytest.raises(OSError, match="the host pins no 100 bytes"):
        HostBuffer(page_locked=True).reserve(100)
