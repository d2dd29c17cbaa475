"""Sweep files of the tests' own, in a folder of groups, and how they are planned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.sweep.conftest import quiet
from titanlab.sweep import Study, plan_study, with_data

# Nothing of it takes long, and no data is prepared.
BASE = "training:\n  steps: 20\n  global_batch: 8\noptimizer: {schedule: {warmup_steps: 2}}\n"


def write_sweep(folder: Path, text: str, name: str = "mine") -> list[str]:
    """A sweep's file, and the arguments that name it."""
    path = folder / "sweeps" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return [f"--config-dir={folder}", f"+sweeps={name}"]


def sweep_text(space: Any, *, node: Mapping[str, Any] | None = None, base: str = BASE, group: str = "space") -> str:
    """A sweep's file with this space; JSON is YAML."""
    inner = json.dumps({"mode": "MULTIRUN", "sweeper": {"space": space, **(node or {})}})
    defaults = f"defaults:\n  - override /data: synthetic\n  - override /hydra/sweeper: {group}\n"
    return f"# @package _global_\n{defaults}{base}hydra: {inner}\n"


def plan(*arguments: str, prepare_data: bool = False) -> Study:
    """A study, planned in silence."""
    study = plan_study(arguments)
    return with_data(study, quiet) if prepare_data else study


def dropped(study: Study) -> list[tuple[str, str, str]]:
    """Label, stage and reason of every point that was dropped."""
    return [(each.point.label, each.stage, each.reason) for each in study.dropped]


def labels(study: Study) -> list[str]:
    """Names of the runs."""
    return [each.recipe.name for each in study.planned]
