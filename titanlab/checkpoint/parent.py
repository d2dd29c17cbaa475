"""The parent of a run: the run from whose checkpoint it started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanlab.checkpoint.folders import another, find, is_step_name, step_of
from titanlab.checkpoint.position import read_position
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.errors import ConfigError

KEY = "checkpoint.load_from"


def parent_of(load_from: str | None) -> dict[str, Any]:
    """`parent_run` (sweep and folder) and `parent_step` for identity.json; empty if there is no parent.

    Args:
        load_from: the recipe's `checkpoint.load_from`.
    """
    if load_from is None:
        return {}
    try:
        checkpoint = find(load_from, KEY)
        if isinstance(checkpoint, Path):
            # The path may be relative, and lead to the checkpoint by a link.
            checkpoint = checkpoint.resolve()
        step = _step(checkpoint)
    except ConfigError:
        # The run may be made again when its checkpoint is gone; it has begun then, and has its record.
        return {}
    name = str(checkpoint)
    if isinstance(checkpoint, Path):
        run = checkpoint.parent.parent
        name = f"{run.parent.name}/{run.name}" if (run / "config.yaml").is_file() else name
    return {"parent_run": name, "parent_step": step}


def _step(checkpoint: Place) -> int:
    """The step of a checkpoint, whose folder may have another name if it was copied out of its run."""
    if is_step_name(checkpoint.name):
        return step_of(checkpoint)
    return read_position(checkpoint, KEY, cure=another(checkpoint)).position.step
