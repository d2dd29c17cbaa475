"""Finds runs: all runs in a folder, the run that a user names, or the points of a sweep."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.records.files import loaded
from titanlab.records.run_folder import RunFolder
from titanlab.system import read_text, user_path

_HASH = re.compile(r"[0-9a-f]{4,64}")


class NoSuchRun(ConfigError):
    """No run has the name that the user gives."""


def list_runs(runs: Path | str, sweep: str | None = None) -> list[RunFolder]:
    """All runs in a folder of runs, or the runs of one sweep, sorted by path; empty if there is no such folder."""
    pattern = f"{sweep or '*'}/*/config.yaml"
    folders = (path.parent for path in user_path(runs).glob(pattern))
    # `create_run` fills a folder under a name with a leading dot, and then renames it.
    return [RunFolder(path) for path in sorted(folders) if not path.name.startswith(".")]


def find_run(text: str, runs: Path | str = "runs") -> RunFolder:
    """The run that a user names by path, `sweep/folder`, folder's name, label, or first digits of its hash.

    These ways are tried in this order; the first way that matches any run decides.

    Raises:
        NoSuchRun: no run matches.
        ConfigError: several runs match; or the run's files are damaged, or of another version.
    """
    for path in (user_path(text), user_path(runs) / text):
        if text and (path / "config.yaml").is_file():
            run = RunFolder(path)
            run.check_files()
            return run
    known = list_runs(runs)
    digits = text.strip("/").lower()
    for matches in (
        [run for run in known if run.path.name == text],
        [run for run in known if run.name == text],
        [run for run in known if _HASH.fullmatch(digits) and _has_hash(run, digits)],
    ):
        if len(matches) == 1:
            matches[0].check_files()
            return matches[0]
        if matches:
            raise ConfigError("run", text, f"fits {len(matches)} runs under {runs}", f"try {_joined_names(matches)}")
    if not known:
        cure = "train one first (titanlab train), or say where runs are (--runs FOLDER)"
        raise NoSuchRun("run", text, f"fits no run under {runs}", cure)
    names = {run.path.name: run for run in known}
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.4)
    latest = sorted(known, key=lambda run: run.path.stat().st_mtime, reverse=True)[:3]
    cure = f"try {_joined_names([names[name] for name in near] or latest)}"
    raise NoSuchRun("run", text, f"fits no run under {runs}", cure)


def _has_hash(run: RunFolder, digits: str) -> bool:
    if not run.hash8 or not run.hash8.startswith(digits[:8]):
        return False
    if len(digits) <= 8:
        return True
    try:
        identity = run.identity()
    except ConfigError:
        return False
    return identity is None or identity.sha256.startswith(digits)


def _joined_names(runs: Iterable[RunFolder]) -> str:
    names = [f"{run.sweep}/{run.path.name}" for run in runs]
    return " or ".join(names[:4]) + (" …" if len(names) > 4 else "")


_CURE = "restore that file, or submit the sweep again: it is written anew"


def read_points(sweep: Path) -> list[dict[str, Any]]:
    """The lines of points.jsonl, in the order of the plan; empty if the folder's runs were started one by one."""
    path = sweep / "points.jsonl"
    try:
        # Not `splitlines`: it also splits at U+2028 and similar characters, which JSON text may contain.
        lines = read_text(path).split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError("sweep", path, f"cannot be read ({error.strerror or type(error).__name__})", _CURE) from error
    except UnicodeDecodeError as error:
        raise ConfigError("sweep", path, "is not text in UTF-8", _CURE) from error
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
    except ValueError as error:
        raise ConfigError("sweep", path, f"line {number} is not JSON", _CURE) from error
    fits = isinstance(value, dict) and isinstance(value.setdefault("point", {}), dict)
    if not fits or not isinstance(value.get("run"), str | None) or not isinstance(value.get("dropped"), dict | None):
        raise ConfigError("sweep", path, f"line {number} is not a point of a sweep", _CURE)
    point: dict[str, Any] = value
    return point
