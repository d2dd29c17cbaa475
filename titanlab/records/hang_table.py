"""A diagnosis as a table with one row for each rank, and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titanlab.records.diagnosis import Diagnosis, described, named
from titanlab.records.hang_file import HangRecord

_HEADINGS = {"rank": "rank", "state": "state", "phase": "phase", "last": "last collective", "waits_for": "waits for"}
_STACK_LINES = 8


def rank_rows(
    diagnosis: Diagnosis, records: Mapping[int, HangRecord], others: Mapping[int, str], *, world: int
) -> list[dict[str, Any]]:
    """One row for each rank: `rank`, `state`, `phase`, `last`, `is_done`, `sequence`, `waits_for`, `place`, `stack`.

    Args:
        others: what is known of ranks without a record.
        world: number of ranks; 0: unknown.
    """
    return [
        _row(diagnosis, records, rank, others) for rank in sorted({*range(world), *records, *others, *diagnosis.ranks})
    ]


def _row(
    diagnosis: Diagnosis, records: Mapping[int, HangRecord], rank: int, others: Mapping[int, str]
) -> dict[str, Any]:
    record = records.get(rank)
    row: dict[str, Any] = {"rank": rank, "is_named": rank in diagnosis.ranks}
    if record is None:
        state = others.get(rank, "no record")
        unknown = dict.fromkeys(("phase", "step", "last", "is_done", "sequence", "place"))
        return {**row, "state": state, **unknown, "waits_for": [], "stack": []}
    wait = diagnosis.waits.get(rank)
    last = record.collectives[-1] if record.collectives else None
    text, is_done = (None, None) if last is None else (described(record, last), last.is_done)
    if record.messages is not None and record.messages.waiting is not None and wait is not None:
        text, is_done = wait.text, False
    return {
        **row,
        "state": f"{record.state} ({record.activity})" if record.activity else record.state,
        "phase": record.phase,
        "step": record.step,
        "last": text,
        "is_done": is_done,
        "sequence": None if last is None else last.sequence,
        "waits_for": [] if wait is None else sorted(wait.on),
        "place": None if record.source is None else str(record.source),
        "stack": [str(place) for place in record.stack],
    }


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table, and below it the place of every rank; ranks that are at the same place have one line."""
    texts = [[_cell(row, key) for key in _HEADINGS] for row in rows]
    widths = [max(map(len, column)) for column in zip(_HEADINGS.values(), *texts, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in (list(_HEADINGS.values()), *texts)
    ]
    places: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        if row["stack"]:
            places.setdefault(tuple(row["stack"][:_STACK_LINES]), []).append(row["rank"])
    for stack, ranks in places.items():
        lines += ["", f"{named(ranks)}, innermost call first:", *(f"  {place}" for place in stack)]
    return lines


def _cell(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if key == "last" and value is not None and row["is_done"] is not None:
        return f"{value}: {'done' if row['is_done'] else 'pending'}"
    if key == "waits_for":
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
