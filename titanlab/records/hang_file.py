"""`attempts/N/hang/rank-R.json`: where a rank was when the run hung, and its last collectives.

Files may be damaged, or come from another version: every value's type is checked when a file is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from titanlab.errors import ConfigError
from titanlab.records.json_file import read_object
from titanlab.records.run_folder import RunFolder
from titanlab.system.files import finite, write_text

SCHEMA = 1
_TEXT = 500
_BYTES = 1 << 24
STATES = ("waits", "computes", "stands", "raised")
T = TypeVar("T")


class DamagedRecordError(ValueError):
    """A record of a hang has a value of another type than it must have."""


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
    """

    group: str
    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_message: bool
    is_done: bool


@dataclass(frozen=True)
class GroupRecord:
    """A process group: the axis of the mesh that it belongs to, and its ranks."""

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
        runs: whether a schedule ran; if not, all its messages had been started.
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
        state: one of STATES.
        phase: such as `step 3`.
        step: last complete step.
        seconds: since the phase began.
        limit: the limit that the phase reached; None: another rank reached its limit first.
        activity: `data`, `checkpoint` or empty.
        source: the innermost line of titanlab or of the user.
        stack: of the main thread, innermost first.
        groups: process groups by torch's name.
        collectives: oldest first.
    """

    rank: int
    state: str
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


def hang_folder(run: RunFolder, attempt: int) -> Path:
    """The folder of an attempt's records of a hang."""
    return run.attempt_folder(attempt) / "hang"


def write_hang(run: RunFolder, attempt: int, rank: int, record: Mapping[str, Any]) -> None:
    """Write a rank's record.

    Raises:
        OSError: the file cannot be written.
    """
    folder = hang_folder(run, attempt)
    folder.mkdir(parents=True, exist_ok=True)
    # In one line: a record has a thousand collectives.
    write_text(folder / f"rank-{rank}.json", json.dumps(finite({"schema": SCHEMA, **record})) + "\n")


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
        DamagedRecordError: a value has another type, or the schema is another.
    """
    if _get(value, "schema", int) != SCHEMA:
        raise DamagedRecordError(f"schema {value['schema']} is not {SCHEMA}")
    state = _get(value, "state", str)
    if state not in STATES:
        raise DamagedRecordError(f"state: {state[:40]!r} is not known")
    source = _get(value, "source", dict, optional=True)
    messages = _get(value, "messages", dict, optional=True)
    return HangRecord(
        rank=_get(value, "rank", int),
        state=state,
        phase=_get(value, "phase", str),
        step=_get(value, "step", int),
        seconds=_get(value, "seconds", float),
        limit=_get(value, "limit", float, optional=True),
        activity=_get(value, "activity", str),
        source=None if source is None else _place(source),
        stack=_list(value, "stack", dict, _place),
        groups={
            name: _group(_checked(f"groups.{name}", group, dict)) for name, group in _get(value, "groups", dict).items()
        },
        messages=None if messages is None else _messages(messages),
        collectives=_list(value, "collectives", dict, _collective),
    )


def _place(value: Mapping[str, Any]) -> CodeLine:
    return CodeLine(_get(value, "file", str), _get(value, "line", int), _get(value, "function", str))


def _group(value: Mapping[str, Any]) -> GroupRecord:
    return GroupRecord(_get(value, "axis", str), _list(value, "ranks", int, int))


def _collective(value: Mapping[str, Any]) -> Collective:
    return Collective(
        group=_get(value, "group", str),
        sequence=_get(value, "sequence", int),
        operation=_get(value, "operation", str),
        sizes=_list(value, "sizes", list, lambda sizes: tuple(_checked("sizes", size, int) for size in sizes)),
        dtypes=_list(value, "dtypes", str, str),
        is_message=_get(value, "is_message", bool),
        is_done=_get(value, "is_done", bool),
    )


def _messages(value: Mapping[str, Any]) -> Messages:
    waiting = _get(value, "waiting", dict, optional=True)
    return Messages(
        runs=_get(value, "runs", bool),
        stages=_list(value, "stages", int, int),
        sent=_counts(value, "sent"),
        received=_counts(value, "received"),
        waiting=None if waiting is None else _waiting(waiting),
    )


def _waiting(value: Mapping[str, Any]) -> Waiting:
    return Waiting(
        operation=_get(value, "operation", str),
        what=_get(value, "what", str),
        microbatch=_get(value, "microbatch", int),
        stage=_get(value, "stage", int),
        peer_stage=_get(value, "peer_stage", int),
        peer=_get(value, "peer", int),
    )


def _counts(value: Mapping[str, Any], key: str) -> dict[int, int]:
    counts: dict[int, int] = {}
    for rank, count in _get(value, key, dict).items():
        if not rank.isdecimal() or len(rank) > 9:
            raise DamagedRecordError(f"{key}: {rank[:40]!r} is no rank")
        counts[int(rank)] = _checked(f"{key}.{rank}", count, int)
    return counts


def _list(value: Mapping[str, Any], key: str, kind: type, make: Callable[[Any], T]) -> tuple[T, ...]:
    return tuple(make(_checked(key, item, kind)) for item in _get(value, key, list))


def _get(value: Mapping[str, Any], key: str, kind: type, *, optional: bool = False) -> Any:
    if key not in value:
        raise DamagedRecordError(f"{key} is missing")
    return None if optional and value[key] is None else _checked(key, value[key], kind)


def _checked(key: str, value: Any, kind: type) -> Any:
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise DamagedRecordError(f"{key} is of type {type(value).__name__}, and not {kind.__name__}")
    if isinstance(value, str):
        # Texts are printed on terminals, which obey control characters.
        return "".join(letter if letter.isprintable() else "?" for letter in value[:_TEXT])
    return value
