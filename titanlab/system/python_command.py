"""How a child process of Python is started, so that it imports what this process imports."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def module_command(name: str) -> list[str]:
    """The command that runs a module of titanlab.

    With -P the current folder is not searched: a clone of titanlab there, or a file named `random.py`, would be
    imported instead of what this process has. Without it if this process has titanlab from there itself: `python -m
    titanlab`, an interpreter or a notebook in a clone that is not installed. The last two have "" on their path.
    """
    options = [] if sys.path and Path(sys.path[0]).absolute() == _ROOT else ["-P"]
    return [sys.executable, *options, "-m", name]
