"""Imports libraries that print or warn while they are imported."""

from __future__ import annotations

import importlib
import logging
import warnings
from types import ModuleType


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
