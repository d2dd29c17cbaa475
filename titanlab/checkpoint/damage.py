"""Errors about damaged checkpoints."""

from __future__ import annotations

from titanlab.errors import ConfigError

_MOST_TEXT = 200


class DamagedFile(ValueError):
    """A file of a checkpoint is not what was saved; the message names the file and says why, without a subject."""


class DamagedCheckpoint(ConfigError):
    """A checkpoint cannot be used, because its files are not those that a run has saved.

    A run that resumes by itself goes on from the checkpoint before it.
    """


def one_line(text: object) -> str:
    """Text from a file that may be from a stranger, in one line of bounded length."""
    line = " ".join(str(text).split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}…"
