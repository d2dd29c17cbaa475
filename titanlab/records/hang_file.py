"""`attempts/N/hang/rank-R.json`: where a rank was when the run hung, and its last collectives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from titanlab.errors import ConfigError
from titanlab.records.json_file import read_object
from titanlab.records.run_folder import RunFolder
from titanlab.system import finite, write_text

SCHEMA = 1
_TEXT = 500
_BYTES = 1 << 24
RankState = Literal["waits", "computes", "stands", "raised"]


class DamagedRecordError(ValueError):
    """A record of a hang has a value of the wrong type."""


@dataclass(frozen=True)
class CodeLine:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        file = self.file if self.file.startswith("titanlab/") else "/".join(self.file.split("/")[-2:])
        return f"{self.function} ({file}:{self.line})"


@dataclass(frozen=True)
class Collective:
    """A collective, or a send or receive, that a rank has called.

    Attributes:
        group: torch's name of the process group.
        sequence: its number in the group.
        operation: `all_reduce`, `send`, …
        sizes: shapes of its inputs.
        dtypes: of its inputs, in torch's words.
        is_message: whether it is a send or receive.
        is_done: whether it has ended.
        created: when it was called, in seconds since the epoch.
    """

    group: str
    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_message: bool
    is_done: bool
    created: float = 0.0


@dataclass(frozen=True)
class GroupRecord:
    """A process group: its axis of the mesh, and its ranks."""

    axis: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Waiting:
    """The send or receive of a pipeline for which a rank waits."""

    operation: str
    what: str
    microbatch: int
    stage: int
    peer_stage: int
    peer: int


@dataclass(frozen=True)
class Messages:
    """Sends and receives of a pipeline: how many a rank has started, by the other rank, and what it waits for.

    Attributes:
        runs: whether a schedule was running; if not, all its messages had been started.
        stages: the rank's stages.
    """

    runs: bool
    stages: tuple[int, ...]
    sent: Mapping[int, int]
    received: Mapping[int, int]
    waiting: Waiting | None


@dataclass(frozen=True, kw_only=True)
class HangRecord:
    """One rank's record.

    Attributes:
        state: `waits` for other ranks or its device, `computes`, `stands` elsewhere, or has `raised` an error.
        phase: such as `step 3`.
        step: last complete step.
        seconds: since the phase began.
        limit: the limit that the phase reached; None: another rank reached its limit first.
        activity: `data`, `checkpoint` or empty.
        source: the innermost line of titanlab or of the user.
        stack: of the main thread, innermost first.
        groups: process groups by torch's name.
        collectives: oldest first.
        coordinates: the rank's number on each axis whose degree is above 1.
        time: when the record was made, in seconds since the epoch.
    """

    rank: int
    state: RankState
    phase: str
    step: int
    seconds: float
    limit: float | None
    activity: str
    source: CodeLine | None
    stack: tuple[CodeLine, ...]
    groups: Mapping[str, GroupRecord]
    messages: Messages | None
    collectives: tuple[Collective, ...]
    coordinates: Mapping[str, int] = field(default_factory=dict)
    time: float = 0.0


def hang_folder(run: RunFolder, attempt: int) -> Path:
    """The folder of an attempt's records of a hang."""
    return run.attempt_folder(attempt) / "hang"


def write_hang(run: RunFolder, attempt: int, record: HangRecord) -> None:
    """Write a rank's record."""
    folder = hang_folder(run, attempt)
    folder.mkdir(parents=True, exist_ok=True)
    # In one line: a record has a thousand collectives.
    text = json.dumps(finite({"schema": SCHEMA, **asdict(record)}))
    write_text(folder / f"rank-{record.rank}.json", text + "\n")


def read_hang(run: RunFolder, attempt: int) -> tuple[dict[int, HangRecord], dict[int, str]]:
    """The records of an attempt by rank, and for damaged files the reason in one line."""
    records: dict[int, HangRecord] = {}
    damaged: dict[int, str] = {}
    for path in sorted(hang_folder(run, attempt).glob("rank-*.json")):
        number = path.stem.removeprefix("rank-")
        if not number.isdecimal() or len(number) > 9:
            continue
        try:
            if path.stat().st_size > _BYTES:
                raise DamagedRecordError(f"it has more than {_BYTES} bytes")
            record = parse_hang(read_object(path) or {})
            if record.rank != int(number):
                raise DamagedRecordError(f"it is of rank {record.rank}")
            records[record.rank] = record
        except OSError as error:
            damaged[int(number)] = f"{path}: {error.strerror}"
        except ConfigError as error:
            damaged[int(number)] = f"{path}: {error.rule}"
        except DamagedRecordError as error:
            damaged[int(number)] = f"{path}: {error}"
    return records, damaged


def parse_hang(value: Mapping[str, Any]) -> HangRecord:
    """The record in a JSON object.

    Raises:
        DamagedRecordError: a value has the wrong type, or the schema's number differs.
    """
    import msgspec

    if value.get("schema") != SCHEMA:
        raise DamagedRecordError(f"schema {value.get('schema')} is not {SCHEMA}")
    try:
        return msgspec.convert(_printable(value), HangRecord, str_keys=True)
    except msgspec.ValidationError as error:
        raise DamagedRecordError(str(error)) from error


def _printable(value: Any) -> Any:
    """The value with short texts that cannot control the terminal on which they are printed."""
    if isinstance(value, str):
        return "".join(letter if letter.isprintable() else "?" for letter in value[:_TEXT])
    if isinstance(value, Mapping):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value
