"""Imports of libraries that talk while they are imported."""

from __future__ import annotations

import importlib
import logging
import warnings
from types import ModuleType


def import_quietly(name: str) -> ModuleType:
    """Import a module without the notes that it and what it imports write.

    torchao tells of compiled extensions for other hardware that it cannot load here, and of what it will rename.

    Raises:
        ImportError: it is not installed, or not for this torch.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    finally:
        logging.disable(before)
