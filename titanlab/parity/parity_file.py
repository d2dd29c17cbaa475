"""parity.json in the folder of a sweep: the newest proof of every run. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.records.claim import claimed
from titanlab.records.json_file import check_object, read_object
from titanlab.system.files import write_json

SCHEMA = 1
NAME = "parity.json"
_LOCK = ".parity.lock"
_PATIENCE_SECONDS = 10.0
_CURE = "remove that file, and prove the sweep again"


def read_parity(sweep: Path) -> dict[str, Any] | None:
    """The content of a sweep's parity.json; None if it was never proved.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    path = sweep / NAME
    value = read_object(path, cure=_CURE)
    if value is None:
        return None
    check_object(path, value, schema=SCHEMA, kinds={"time": str, "reference": str}, cure=_CURE)
    rows = value.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and isinstance(row.get("run"), str) for row in rows):
        raise ConfigError("rows", type(rows).__name__, f"must be a list of rows in {path}", _CURE)
    return value


def write_parity(sweep: Path, rows: Sequence[Mapping[str, Any]], *, reference: str) -> Path:
    """Write rows into a sweep's parity.json; the rows of runs that were not proved again stay. Returns the file.

    Args:
        rows: of `Row.to_mapping`; all rows of a run replace its earlier ones.
        reference: what the runs were held to.

    Raises:
        ConfigError: an earlier file is damaged, another process writes it for too long, or the folder is read-only.
        OSError: the file cannot be written.
    """
    sweep.mkdir(parents=True, exist_ok=True)
    # Two commands may prove parts of one sweep at the same time.
    with claimed(sweep, "sweep", patience_seconds=_PATIENCE_SECONDS, file=_LOCK):
        earlier = (read_parity(sweep) or {}).get("rows", [])
        now = {row["run"] for row in rows}
        kept = [row for row in earlier if row["run"] not in now]
        value = {
            "schema": SCHEMA,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "reference": reference,
            "rows": [*kept, *rows],
        }
        write_json(sweep / NAME, value)
    return sweep / NAME
