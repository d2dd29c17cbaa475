"""An attempt at a run that hung, as its records show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from titanlab.distributed.silence import diagnosis_of
from titanlab.errors import ConfigError
from titanlab.records.diagnosis import Diagnosis
from titanlab.records.hang_file import HangRecord, read_hang
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_records import RunRecords


@dataclass(frozen=True, kw_only=True)
class HungAttempt:
    """The records of an attempt and their diagnosis.

    Attributes:
        others: what is known of ranks without a record.
        damaged: by rank, the file that cannot be read and why.
        world: number of ranks; 0: unknown.
    """

    diagnosis: Diagnosis
    records: Mapping[int, HangRecord]
    others: Mapping[int, str]
    damaged: Mapping[int, str]
    world: int


def has_hung(run: RunRecords, attempt: int) -> bool:
    """Whether ranks of an attempt have noted that they hang."""
    return any(note.kind is OutcomeKind.HANG for note in run.failures(attempt))


def hung_attempt(run: RunRecords, attempt: int) -> HungAttempt:
    """Read and diagnose the records of an attempt that hung."""
    records, damaged = read_hang(run, attempt)
    notes = run.failures(attempt)
    try:
        world = run.config(attempt).get("world")
    except ConfigError:
        world = None
    size = world if isinstance(world, int) and not isinstance(world, bool) and 0 < world <= _MOST_RANKS else 0
    others = {
        note.rank: (note.cause or "").rpartition(f"rank {note.rank} ")[2].partition(";")[0] or note.kind.meaning
        for note in notes
        if note.rank is not None and note.rank not in records
    }
    diagnosis = diagnosis_of(notes, size, records)
    return HungAttempt(diagnosis=diagnosis, records=records, others=others, damaged=damaged, world=size)


_MOST_RANKS = 1_000_000
