"""points.jsonl of a sweep's folder: a line for each point of its space, with the run it came to, or why to none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlab.records.run_folder import RunFolder


def read_points(sweep: Path) -> list[dict[str, Any]]:
    """The lines, in the order of the plan; none where runs were started one by one."""
    try:
        lines = (sweep / "points.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.strip()]


def point_of(run: RunFolder) -> Mapping[str, Any]:
    """The values of the sweep's keys under which a run was planned; empty for a run of no sweep."""
    for line in read_points(run.path.parent):
        if line.get("run") == run.path.name:
            values: dict[str, Any] = line.get("point") or {}
            return values
    return {}
