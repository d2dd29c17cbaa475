"""Formats paths for people."""

from __future__ import annotations

import os
from pathlib import Path


def shown_path(path: object) -> str:
    """The path relative to the current folder if it is inside it (links resolved), else whole; or a store's address."""
    if isinstance(path, Path) and path.resolve().is_relative_to(Path.cwd()):
        return os.path.relpath(path)
    return str(path)
