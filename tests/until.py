"""Waiting for what other processes do, which may take minutes where other work has the cores."""

import time
from collections.abc import Callable
from typing import Any


def until(
    true: Callable[[], Any],
    seconds: float = 180.0,
    *,
    told: Callable[[], str] = lambda: "nothing happened",
    pause_seconds: float = 0.05,
) -> None:
    """Wait until `true()` holds; after `seconds` the test fails with the message that `told()` returns."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, told()
        time.sleep(pause_seconds)
