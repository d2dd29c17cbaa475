"""Imports large libraries fast and without their messages."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType


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


def import_quietly(name: str) -> ModuleType:
    """Import a module without warnings and log messages of it and of its imports.

    torchao reports compiled extensions for other hardware, which it cannot load, and names that it will change.

    Raises:
        ImportError: the module is not installed, or does not fit this torch.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    finally:
        logging.disable(before)
