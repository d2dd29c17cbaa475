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
    """For imports inside the block: no garbage collection runs there, and later collections skip all objects that exist
    when it ends.

    Modules stay until the process ends. The import of torch makes half a million objects, and the collector would visit
    them again and again: a fifth of the time of the imports.
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
    """At exit, undo `gc.freeze` if Triton is imported: otherwise Triton prints pages about objects that still exist."""
    if "triton" in sys.modules:
        gc.unfreeze()


def import_quietly(name: str) -> ModuleType:
    """Import a module; hide the warnings and log messages of the module and of its imports.

    torchao warns of its extensions for other hardware, which it cannot load, and of deprecated names.

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
