"""The parent of a run: the run from whose checkpoint it started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanlab.checkpoint.folders import find, step_of
from titanlab.errors import ConfigError


def parent_of(load_from: str | None) -> dict[str, Any]:
    """`parent_run` (sweep and folder) and `parent_step` for identity.json; empty if there is no parent.

    Args:
        load_from: the recipe's `checkpoint.load_from`.
    """
    if load_from is None:
        return {}
    try:
        checkpoint = find(load_from, "checkpoint.load_from")
    except ConfigError:
        # The run may be made again when its checkpoint is gone; it has begun then, and has its record.
        return {}
    name = str(checkpoint)
    if isinstance(checkpoint, Path):
        run = checkpoint.parent.parent
        name = f"{run.parent.name}/{run.name}" if (run / "config.yaml").is_file() else name
    return {"parent_run": name, "parent_step": step_of(checkpoint)}
