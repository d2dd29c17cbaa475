"""Reads the files that wandb writes offline: config, rows, summary and exit code of each run.

wandb has a class for its records and ships no Python reader of its files. A file is a log in LevelDB's format: a header
of 7 bytes, then blocks of 32 KiB. A record lies in one piece or in several, and no piece crosses the end of a block.
Each piece has a checksum, its length and its type. The file of a run that still runs or was killed ends in the middle.

https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.system.quiet_import import import_quietly
from titanlab.system.regular_file import read_bytes
from titanlab.system.user_path import user_path
from titanlab.tracker.record import REPLACED

# Names of wandb in rows: step, and seconds since 1970.
STEP, TIMESTAMP = "_step", "_timestamp"

_HEADER = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
_BLOCK = 32768
_PIECE = struct.Struct("<IHB")  # checksum, length, type
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class WandbRun:
    """One run as wandb has recorded it.

    Attributes:
        id: wandb's id; all starts of one run have the same.
        name: the displayed name; titanlab gives the name of the run's folder.
        group: titanlab gives the sweep.
        config: the recipe, with the flat keys `layout.*` and `point.*`.
        rows: one for each step, in order, with `_step`, `_timestamp` (seconds since 1970) and `attempt`.
        summary: medians and last values; empty until the run has ended.
        exit_code: None: the record does not have the run's end.
        cores: CPU cores of the machine; None: not recorded.
        damaged: number of places in the files that could not be read, without the end that is missing.
        path: of the latest file; None: it comes from wandb's server.
    """

    id: str
    name: str = ""
    group: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    cores: int | None = None
    damaged: int = 0
    path: Path | None = None


def read_runs(path: Path | str) -> list[WandbRun]:
    """The runs in a file of wandb, or in all files below a folder; the starts of one run are joined.

    A run that was continued from a checkpoint trains steps again. As in metrics.jsonl, only the later rows count.

    Args:
        path: a sweep's folder, a run's folder, a folder of `wandb`, or one file `run-ID.wandb`.

    Raises:
        ConfigError: there is no such file, or it is no file of wandb.
    """
    path = user_path(path)
    if path.is_file():
        return [read_file(path)]
    files = [file for file in path.rglob("run-*.wandb") if not {REPLACED, "superseded"} & {*file.parts}]
    if not files:
        cure = "train with tracker=wandb tracker.mode=offline"
        raise ConfigError("path", path, "has no file of wandb below it", cure)
    by_id: dict[str, list[WandbRun]] = {}
    # Names of folders begin with the time of the start.
    for file in sorted(files, key=lambda file: (file.parent.name.removeprefix("offline-"), file)):
        run = read_file(file)
        by_id.setdefault(run.id, []).append(run)
    return [joined(starts) for starts in by_id.values()]


def read_file(path: Path) -> WandbRun:
    """The run in one file, as far as the file can be read.

    Raises:
        ConfigError: it cannot be read, or is no file of wandb.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        rule = f"cannot be read ({error.strerror or type(error).__name__})"
        raise ConfigError("path", path, rule, "name a file run-ID.wandb") from error
    if content[: len(_HEADER)] != _HEADER:
        raise ConfigError("path", path, "is no file of wandb", "name a file run-ID.wandb, or a folder of them")
    builder = _Builder(path)
    for record in _records(content):
        if record is None:
            builder.damaged += 1
        else:
            builder.take(record)
    return builder.run()


def runs_of_project(project: str, group: str | None = None, *, api: Any = None) -> list[WandbRun]:
    """The runs of a project on wandb's server, which needs a network and a key.

    Args:
        project: `ENTITY/PROJECT`.
        group: only runs of this group: a sweep.
        api: a `wandb.Api`; None: a new one.
    """
    if api is None:
        api = import_quietly("wandb").Api()
    return [
        WandbRun(
            id=run.id,
            name=run.name,
            group=run.group or "",
            config=dict(run.config),
            rows=_with_attempt(list(run.scan_history()), run.config),
            summary=dict(run.summary),
            exit_code={"finished": 0, "failed": 1, "crashed": 1, "killed": 1}.get(run.state),
        )
        for run in api.runs(project, filters={"group": group} if group else {})
    ]


def joined(starts: Sequence[WandbRun]) -> WandbRun:
    """One run of all its starts, oldest first."""
    rows: list[Mapping[str, Any]] = []
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for start in starts:
        if start.rows:
            first = start.rows[0][STEP]
            rows = [row for row in rows if row[STEP] < first]
        rows += start.rows
        config |= start.config
        # Until a start has ended, it has wandb's own summary only.
        summary |= start.summary
    latest = starts[-1]
    damaged = sum(start.damaged for start in starts)
    return replace(latest, rows=rows, config=config, summary=summary, damaged=damaged)


class _Builder:
    """Collects the records of one file."""

    def __init__(self, path: Path) -> None:
        self.damaged = 0
        self._path = path
        # The file's name has the id, should the record of the run be damaged.
        self._known: dict[str, Any] = {"id": path.stem.removeprefix("run-")}
        self._config: dict[str, Any] = {}
        self._summary: dict[str, Any] = {}
        self._rows: dict[int, dict[str, Any]] = {}

    def take(self, record: Any) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            self._known |= {"id": run.run_id, "name": run.display_name, "group": run.run_group}
            _update(self._config, run.config.update)
            _update(self._summary, run.summary.update)
        elif kind == "config":
            _update(self._config, record.config.update)
        elif kind == "summary":
            _update(self._summary, record.summary.update)
            for removed in record.summary.remove:
                self._summary.pop(removed.key, None)
        elif kind == "history":
            row: dict[str, Any] = {}
            _update(row, record.history.item)
            step = row.setdefault(STEP, record.history.step.num)
            if isinstance(step, int):
                self._rows[step] = row
        elif kind == "environment":
            self._known["cores"] = record.environment.cpu_count_logical or None
        elif kind == "exit":
            self._known["exit_code"] = record.exit.exit_code

    def run(self) -> WandbRun:
        config = {name: value for name, value in self._config.items() if name != "_wandb"}
        rows = [self._rows[step] for step in sorted(self._rows)]
        return WandbRun(
            **self._known,
            config=config,
            rows=_with_attempt(rows, config),
            summary=self._summary,
            damaged=self.damaged,
            path=self._path,
        )


def _with_attempt(rows: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "attempt": config.get("attempt", 1)} for row in rows]


def _update(values: dict[str, Any], items: Iterable[Any]) -> None:
    """Set values; those of nested keys in mappings inside. An item that is no JSON is left out."""
    for item in items:
        try:
            value = json.loads(item.value_json)
        except (ValueError, RecursionError):
            continue
        *path, name = item.nested_key or [item.key]
        inner = values
        for key in path:
            below = inner.get(key)
            if not isinstance(below, dict):
                below = inner[key] = {}
            inner = below
        inner[name] = value


def _records(content: bytes) -> Iterator[Any]:
    """The records of a file; None for each place that is damaged."""
    record_type = import_quietly("wandb.proto.wandb_internal_pb2").Record
    decode_error = import_quietly("google.protobuf.message").DecodeError
    for data in _pieces(content):
        if data is None:
            yield None
            continue
        record = record_type()
        try:
            record.ParseFromString(data)
        except decode_error:
            yield None
        else:
            yield record


def _pieces(content: bytes) -> Iterator[bytes | None]:
    """The bytes of each record; None for each place that is damaged, after which the next block is read."""
    position = len(_HEADER)
    begun: bytearray | None = None
    while position + _PIECE.size <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _PIECE.size:
            position += left
            continue
        checksum, length, kind = _PIECE.unpack_from(content, position)
        data = content[position + _PIECE.size : position + _PIECE.size + length]
        if length <= left - _PIECE.size and len(data) < length:
            return  # The writer has not come further.
        if length > left - _PIECE.size or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            yield None
            begun = None
            position += left
            continue
        position += _PIECE.size + length
        if kind == _WHOLE:
            begun = None
            yield data
        elif kind == _FIRST:
            begun = bytearray(data)
        elif begun is not None and kind in (_MIDDLE, _LAST):
            begun += data
            if kind == _LAST:
                yield bytes(begun)
                begun = None
