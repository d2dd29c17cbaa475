"""Imports whose objects Python's garbage collector never looks at."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def kept_imports() -> Iterator[None]:
    """Import inside the block: no collection happens there, and none looks at what exists when the block ends.

    Modules stay until the process ends. While torch is imported, half a million objects are made, and the collector
    would look through them again and again: a fifth of the time that the imports take.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@atexit.register
def _free_triton() -> None:
    """Let the interpreter collect at its exit, if Triton is imported: it prints pages about objects that stay."""
    if "triton" in sys.modules:
        gc.unfreeze()
