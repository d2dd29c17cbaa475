"""Formats paths for people."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def shown_path(path: object) -> str:
    """The path relative to the current folder if it is inside it (links resolved), else whole; or a store's address."""
    if isinstance(path, Path) and path.resolve().is_relative_to(Path.cwd()):
        return os.path.relpath(path)
    return str(path)


def sweep_argument(folder: Path) -> str:
    """How a command that a person copies names a sweep: by its name if it is in `runs` here, else by its folder."""
    if folder.absolute().parent == Path("runs").absolute():
        return shlex.quote(folder.name)
    shown = shown_path(folder)
    return shlex.quote(shown if os.sep in shown else os.path.join(os.curdir, shown))
