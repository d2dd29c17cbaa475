"""The rows of a session on the disk: one line of JSON each, written as soon as a row is over."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu_session.children import ROOT
from gpu_session.measure import ABSENT, CUT, FAILED, LATE, MEASURED, WITHOUT_FIGURES
from gpu_session.prediction import Facts
from gpu_session.rows import Row

FILE = "gpu_session.jsonl"
TABLE = "gpu_session.md"
# What every row has.
_KINDS = {"row": str, "status": str, "keys": list}
# Folders and files in which a change makes other figures: the package with its tables, its options, the session, the
# tests that it runs.
_CODE = (
    ("titanlab", "*.py"),
    ("titanlab", "*.json"),
    ("conf", "*.yaml"),
    ("benchmarks/gpu_session", "*.py"),
    ("tests", "test_gpu.py"),
)


def code() -> str:
    """A hash of what is measured and what measures it, also where there is no git."""
    digest = hashlib.sha256()
    for folder, pattern in _CODE:
        for path in sorted((ROOT / folder).rglob(pattern)):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def commit() -> str | None:
    """The commit of the working tree, `+` behind it if files differ; None: git does not say."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


class Record:
    """The rows of one folder.

    A row counts for the same code, device, torch and keys; of several the newest, but a row without figures takes the
    place of none that was measured.
    """

    def __init__(self, folder: Path, facts: Facts, *, code: str, commit: str | None) -> None:
        self.path = folder / FILE
        self._facts = facts
        self._stamp = {"code": code, "commit": commit, "device": facts.device, "torch": facts.torch}
        self._rows: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for entry in _read(self.path):
            if self._is_of_this_machine(entry) and not _has_less(entry, self._rows.get(entry["row"])):
                self._rows[entry["row"]] = entry

    def take(self, path: Path) -> str:
        """Take the newer rows of a file, or of a folder with one. Returns a line that says how many count here."""
        file = path / FILE if path.is_dir() else path
        if not file.exists():
            return f"--from {path}: there is no {FILE} in it"
        counted: set[str] = set()
        taken: dict[str, dict[str, Any]] = {}
        known = _read(file)
        for entry in known:
            name = entry["row"]
            if not self._is_of_this_machine(entry):
                continue
            counted.add(name)
            if _replaces(entry, taken.get(name) or self._rows.get(name)):
                taken[name] = entry
        for entry in taken.values():
            self._rows[entry["row"]] = entry
            self._append(entry)
        total = len({entry["row"] for entry in known})
        others = "" if len(counted) == total else "; the others are of another code, device or torch"
        return f"--from {path}: {len(counted)} of {total} rows count{others}"

    def done(self, row: Row) -> bool:
        """Whether this row need not run again."""
        entry = self._row(row)
        if entry is None or entry["status"] == CUT:
            return False
        if entry["status"] == ABSENT:
            return row.lacking(self._facts) == entry.get("reason")
        # What was measured without a package is measured again where it is installed.
        then = entry.get("packages") or {}
        now = {name: self._facts.packages.get(name) for name in row.uses}
        return all(version is None or then.get(name) == version for name, version in now.items())

    def ended_badly(self, row: Row) -> float | None:
        """When this row failed or was late, in seconds since the epoch; None: it was not."""
        entry = self._row(row)
        return _time(entry) if entry is not None and entry["status"] in (FAILED, LATE) else None

    def keep(self, entry: Mapping[str, Any]) -> None:
        """Write a row, unless it has no figures and an earlier one of the same keys has."""
        row = {"ended": time.time(), **entry, **self._stamp}
        if _has_less(row, self._rows.get(row["row"])):
            return
        self._rows[row["row"]] = row
        self._append(row)

    def rows(self, order: Iterable[Row]) -> list[dict[str, Any]]:
        """The rows that exist with the same keys, in an order."""
        return [entry for row in order if (entry := self._row(row)) is not None]

    def _row(self, row: Row) -> dict[str, Any] | None:
        entry = self._rows.get(row.name)
        return entry if entry is not None and entry["keys"] == list(row.keys) else None

    def _is_of_this_machine(self, entry: Mapping[str, Any]) -> bool:
        return all(entry.get(name) == self._stamp[name] for name in ("code", "device", "torch"))

    def _append(self, row: Mapping[str, Any]) -> None:
        # A line that a killed writer has left half must not swallow this one.
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(_finite(row), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read(file: Path) -> list[dict[str, Any]]:
    """The lines of a file that are rows: others a killed writer has left, or somebody else has written."""
    if not file.exists():
        return []
    entries = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in _KINDS.items()):
            entries.append(entry)
    return entries


def _replaces(new: Mapping[str, Any], old: Mapping[str, Any] | None) -> bool:
    """Whether a row of another folder takes the place of one that is here."""
    if old is None or _has_less(old, new):
        return True
    return not _has_less(new, old) and _time(new) > _time(old)


def _has_less(new: Mapping[str, Any], old: Mapping[str, Any] | None) -> bool:
    """Whether a row has no figures, and the other one was measured with the same keys."""
    if old is None or new["status"] not in WITHOUT_FIGURES:
        return False
    return bool(old["status"] == MEASURED and old["keys"] == new["keys"])


def _time(entry: Mapping[str, Any]) -> float:
    """When a row has ended; of one that does not say it, the epoch."""
    ended = entry.get("ended")
    return ended if isinstance(ended, float) else 0.0


def _finite(value: Any) -> Any:
    """A copy for JSON, which has no infinite numbers and no NaN: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
