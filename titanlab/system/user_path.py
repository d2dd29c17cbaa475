"""Reads paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str | os.PathLike[str]) -> Path:
    """The path, with `~` as the user's home; `~NAME` of nobody stays as it is, as in a shell.

    Its method of pathlib raises a RuntimeError for it, which would be shown as a traceback.
    """
    return Path(os.path.expanduser(text))


def home() -> Path | None:
    """The user's home folder; None for a user who has none, as in many containers: no HOME and no passwd entry."""
    folder = os.path.expanduser("~")
    return Path(folder) if os.path.isabs(folder) else None
