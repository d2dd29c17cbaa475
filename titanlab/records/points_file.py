"""points.jsonl of a sweep: a line for each point of its space, with the run, or the reason why there is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlab.records.run_folder import RunFolder


def read_points(sweep: Path) -> list[dict[str, Any]]:
    """The lines, in the order of the plan; empty if the folder's runs were started one by one."""
    try:
        lines = (sweep / "points.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.strip()]


def point_of(run: RunFolder) -> Mapping[str, Any]:
    """The values of the swept keys for a run; empty if no sweep planned it."""
    for line in read_points(run.path.parent):
        if line.get("run") == run.path.name:
            values: dict[str, Any] = line.get("point") or {}
            return values
    return {}
