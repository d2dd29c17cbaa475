"""Formats paths for people."""

from __future__ import annotations

import os
from pathlib import Path


def shown_path(path: Path) -> str:
    """The path relative to the current folder if it is inside it (links resolved); otherwise the whole path."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
