"""metrics.jsonl: one JSON object a line, added by the one rank that writes, readable while it grows.

Every row has `kind`, `step`, `attempt` and `time`. An attempt opens with a row of kind `attempt`, whose
step is the one it went on from: rows that an earlier attempt has written for later steps no longer
count, although they stay in the file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from titanlab.system.atomic_file import finite

ATTEMPT = "attempt"
TRAIN = "train"
VALIDATION = "validation"


class MetricsWriter:
    """Adds rows to a metrics.jsonl.

    Each row is one write to the end of the file: a reader, or a crash, sees whole rows but perhaps for
    the last one. Numbers that are not finite become null.
    """

    def __init__(
        self, path: Path, *, attempt: int, resumed_step: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._attempt = attempt
        self._clock = clock
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._end_torn_line()
        self.write(ATTEMPT, resumed_step, {})

    def write(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Add one row.

        Raises:
            OSError: the disk is full, or gone.
        """
        row = {"kind": kind, "step": step, "attempt": self._attempt, "time": round(self._clock(), 3), **metrics}
        line = json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n"
        rest = memoryview(line.encode())
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        """Give the file back; further calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_torn_line(self) -> None:
        """Close the line that an attempt was writing when it died, so that ours does not become part of it."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows that count, by step: at most one for each kind and step, that of the latest attempt.

    Lines torn by a crash are passed over; a missing file has no rows.

    Args:
        kind: only rows of this kind; None: all but those that open an attempt. `attempt`: just those, all of them.
    """
    rows = list(_rows(path))
    openings = [row for row in rows if row["kind"] == ATTEMPT]
    if kind == ATTEMPT:
        return openings
    resumed = {row["attempt"]: row["step"] for row in openings}
    counted: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        wanted = row["kind"] != ATTEMPT if kind is None else row["kind"] == kind
        if not wanted or any(row["attempt"] < later and row["step"] > step for later, step in resumed.items()):
            continue
        key = (row["kind"], row["step"])
        if key not in counted or counted[key]["attempt"] <= row["attempt"]:
            counted[key] = row
    return sorted(counted.values(), key=lambda row: row["step"])


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    for line in text.split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(row, dict)
            and isinstance(row.get("kind"), str)
            and _are_whole(row.get("step"), row.get("attempt"))
        ):
            yield row


def _are_whole(*values: object) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)
