"""points.jsonl of a sweep: a line for each point of its space, with the run, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.records.json_file import loaded
from titanlab.records.run_folder import RunFolder
from titanlab.system.files import read_text

_CURE = "restore that file, or submit the sweep again: it is written anew"


def read_points(sweep: Path) -> list[dict[str, Any]]:
    """The lines, in the order of the plan; empty if the folder's runs were started one by one.

    Raises:
        ConfigError: the file is damaged.
    """
    path = sweep / "points.jsonl"
    try:
        # Not `splitlines`: JSON leaves separators of Unicode, such as U+2028, as they are.
        lines = read_text(path).split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError("sweep", path, f"cannot be read ({error.strerror or type(error).__name__})", _CURE) from error
    except UnicodeDecodeError as error:
        raise ConfigError("sweep", path, "is no text in UTF-8", _CURE) from error
    return [_point(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]


def point_of(run: RunFolder) -> Mapping[str, Any]:
    """The values of the swept keys for a run; empty if no sweep planned it, or if the plan is damaged."""
    try:
        points = read_points(run.path.parent)
    except ConfigError:
        return {}
    return next((line["point"] for line in points if line.get("run") == run.path.name), {})


def _point(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        value: Any = loaded(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError("sweep", path, f"line {number} is no JSON", _CURE) from error
    fits = isinstance(value, dict) and isinstance(value.setdefault("point", {}), dict)
    if not fits or not isinstance(value.get("run"), str | None) or not isinstance(value.get("dropped"), dict | None):
        raise ConfigError("sweep", path, f"line {number} is no point of a sweep", _CURE)
    point: dict[str, Any] = value
    return point
