"""The rows of a session on the disk: one line of JSON each, written as soon as a row is over."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu_session.children import ROOT
from gpu_session.measure import CUT
from gpu_session.prediction import Facts
from gpu_session.rows import Row

FILE = "gpu_session.jsonl"
TABLE = "gpu_session.md"


def code() -> str:
    """A hash of what is measured: the package and its options, also where there is no git."""
    digest = hashlib.sha256()
    for folder, pattern in (("titanlab", "*.py"), ("conf", "*.yaml")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def commit() -> str | None:
    """The commit of the working tree, `+` behind it if files differ; None: git does not say."""
    try:
        said = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() or None


class Record:
    """The rows of one folder.

    A row counts for the same code, device, torch and keys; the newest counts.
    """

    def __init__(self, folder: Path, facts: Facts, *, code: str, commit: str | None) -> None:
        self.path = folder / FILE
        self._stamp = {"code": code, "commit": commit, "device": facts.device, "torch": facts.torch}
        self._rows: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.take(self.path)

    def take(self, path: Path) -> None:
        """Read earlier rows, of a file or of a folder with one; those of another code, device or torch do not count."""
        path = path / FILE if path.is_dir() else path
        if not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                # The end of a file whose writer was killed.
                continue
            same = all(found.get(name) == self._stamp[name] for name in ("code", "device", "torch"))
            if isinstance(found, dict) and same and "row" in found:
                self._rows[found["row"]] = found
                if path != self.path:
                    self._append(found)

    def done(self, row: Row) -> bool:
        """Whether this row need not run again."""
        found = self._rows.get(row.name)
        return found is not None and found["status"] != CUT and found["keys"] == list(row.keys)

    def keep(self, found: Mapping[str, Any]) -> None:
        """Write a row."""
        row = {**found, **self._stamp}
        self._rows[row["row"]] = row
        self._append(row)

    def _append(self, row: Mapping[str, Any]) -> None:
        # A line that a killed writer has left half must not swallow this one.
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(_finite(row), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self, order: Iterable[Row]) -> list[dict[str, Any]]:
        """The rows that exist, in an order."""
        return [self._rows[row.name] for row in order if row.name in self._rows]


def _finite(value: Any) -> Any:
    """The value as JSON can say it: what is not finite is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
