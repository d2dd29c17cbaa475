"""metrics.jsonl: one JSON object a line; one rank appends rows, and others may read at the same time.

Every row has `kind`, `step`, `attempt` and `time`. The first row of an attempt has the kind `attempt`, and its step
is the step that the attempt resumed from. Rows of earlier attempts for later steps stay in the file but are ignored.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.system import finite, open_to_write, parse_json, read_bytes

ATTEMPT = "attempt"
TRAIN = "train"
VALIDATION = "validation"
EXPERTS = "experts"
"""Kind of rows with counts of tokens by block and expert; these are not metrics, so trackers do not get them."""
_EVERY_ROW = ("kind", "step", "attempt", "time")
# The largest file that is read; a million rows have 0.6 GB.
_MOST_BYTES = 1 << 34


class MetricsWriter:
    """Appends rows to a metrics.jsonl, each in one write: at most the last row can be incomplete after a crash.

    Numbers that are not finite become null.
    """

    def __init__(
        self, path: Path, *, attempt: int, resumed_step: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._attempt = attempt
        self._clock = clock
        self._descriptor = open_to_write(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._rest = b""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            # End the incomplete line of an attempt that crashed, so that the next row starts a new line.
            os.write(self._descriptor, b"\n")
        self.write(ATTEMPT, resumed_step, {})

    def write(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one row.

        Raises:
            OSError: the disk is full or unreachable; `flush` writes the rest of the row.
        """
        row = {"kind": kind, "step": step, "attempt": self._attempt, "time": round(self._clock(), 3), **metrics}
        line = json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n"
        self._rest += line.encode()
        self.flush()

    def flush(self) -> None:
        """Write the rest of a row that did not fit on a full disk."""
        while self._rest:
            self._rest = self._rest[os.write(self._descriptor, self._rest) :]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def metrics_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a row, without the keys that every row has."""
    return {key: value for key, value in row.items() if key not in _EVERY_ROW}


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The valid rows, sorted by step: for each kind and step, the row of the latest attempt.

    Incomplete lines are skipped; a missing file has no rows.

    Args:
        kind: only rows of this kind; None: all kinds but `attempt`. `attempt`: the first row of every attempt.

    Raises:
        ConfigError: the file cannot be read.
    """
    rows = list(_rows(path))
    attempts = [row for row in rows if row["kind"] == ATTEMPT]
    if kind == ATTEMPT:
        return attempts
    resumed = {row["attempt"]: row["step"] for row in attempts}
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        is_selected = row["kind"] != ATTEMPT if kind is None else row["kind"] == kind
        if not is_selected or any(row["attempt"] < later and row["step"] > step for later, step in resumed.items()):
            continue
        key = (row["kind"], row["step"])
        if key not in latest or latest[key]["attempt"] <= row["attempt"]:
            latest[key] = row
    return sorted(latest.values(), key=lambda row: row["step"])


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = read_bytes(path, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        rule = f"cannot be read ({error.strerror or type(error).__name__})"
        raise ConfigError("run", path, rule, "restore that file, or remove it") from error
    for line in text.split(b"\n"):
        try:
            row = parse_json(line)
        except ValueError:
            continue
        # `type`, because JSON's true is not a number.
        kinds = [type(row.get(key)) for key in ("kind", "step", "attempt")] if isinstance(row, dict) else None
        if kinds == [str, int, int]:
            yield row
