"""A checkpoint whose content cannot be read: told in a line that names it and the one before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from titanlab.checkpoint.folders import another
from titanlab.errors import ConfigError
from titanlab.outcome import OutcomeKind, classify, first_line

# Ends of the machine, that say nothing about the checkpoint.
_NOT_ITS_FAULT = (OutcomeKind.OOM, OutcomeKind.NODE_FAIL, OutcomeKind.HANG)


@contextlib.contextmanager
def damage_named(checkpoint: Path, key: str) -> Iterator[None]:
    """Inside, a checkpoint is read.

    Args:
        key: how it was given, for the error.

    Raises:
        ConfigError: its content is damaged.
    """
    try:
        yield
    except CheckpointException as error:
        # One entry for each rank that failed; the others only hear of it.
        cause = next((failure[0] for failure in error.failures.values()), error)
        if classify(cause) in _NOT_ITS_FAULT:
            raise
        raise ConfigError(key, checkpoint, f"cannot be read ({first_line(cause)})", another(checkpoint)) from error
