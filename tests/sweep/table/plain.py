"""Rows of a sweep's table, written down: no folder is made."""

from __future__ import annotations

from typing import Any

from titanlab.sweep import NAMES


def row(recipe: str = "dp_s2", speed: float | None = 1000.0, **given: Any) -> dict[str, Any]:
    """A run that is done; every column that is not given is None."""
    values = {"state": "ended", "outcome": "done", "layout.label": recipe, "world": 2, "oversubscribed": False}
    figures = {"tokens_per_second": speed, "memory_gib": 1.0, "mfu_percent": 40.0, "started": 0.0}
    return {**dict.fromkeys(NAMES), **values, **figures, **given}
