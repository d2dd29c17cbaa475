"""Paths as a person sees them."""

from __future__ import annotations

import os
from pathlib import Path


def shown_path(path: Path) -> str:
    """The path from the current folder, if it is below it, also by way of a link; else the whole path."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
