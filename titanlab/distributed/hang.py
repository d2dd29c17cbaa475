"""When a run hangs: notes of ranks that cannot write one, and the verdict over the notes and records of all ranks.

A rank that hangs writes a note (`distributed.watchdog`) as soon as its own limit or another rank's is reached. The
process that started a rank runs on the same host: if the rank writes no note, that process writes one for it.
`since` is when the ranks were started, in seconds since the epoch: older notes are of earlier attempts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from titanlab.errors import ConfigError
from titanlab.records import (
    Diagnosis,
    HangRecord,
    Outcome,
    OutcomeKind,
    RunFolder,
    diagnose,
    different_calls,
    first_cause,
    is_silent,
    odd_calls,
    read_hang,
)
from titanlab.system import STOPPED, process_state

# Time for a rank's own note after another rank's note of a hang; ranks look for such notes at least every 5 s.
ANSWER_SECONDS = 8.0
_POLL_SECONDS = 0.2
# Time for a process that is blocked in native code to write its stacks into its log.
_STACKS_SECONDS = 0.5
_MOST_NAMED = 8
_MOST_RANKS = 1_000_000
STATES: Mapping[str, str] = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "its process is stopped by a debugger",
    "D": "its process waits for a disk or a file server (state D)",
    "R": "its process runs native code that lets no other thread run (state R)",
    "S": "its process sleeps in native code that lets no other thread run (state S)",
    "Z": "its process is gone",
}


def hangs_of_others(run: RunFolder, rank: int | None, *, since: float) -> list[Outcome]:
    """Notes of hangs by other ranks in the run's newest attempt; empty if the notes cannot be read.

    Args:
        rank: the rank whose own note is left out; None: no rank.
        since: seconds since the epoch; older notes are from earlier attempts and do not count.
    """
    try:
        notes = run.failures(run.newest_attempt())
    except (OSError, ValueError):
        return []
    return [note for note in notes if note.kind is OutcomeKind.HANG and note.rank != rank and note.ended >= since]


def await_notes(run: RunFolder, pids: Mapping[int, int], *, since: float, world: int | None = None) -> bool:
    """If ranks hang, wait until every rank has a note; write the note for a rank of this host that writes none.

    Args:
        pids: process by rank, for the ranks of this host that have not ended.
        world: number of ranks of the run; None: do not wait for other hosts' ranks.

    Returns:
        whether a rank of this host wrote none: it must be killed before it can write another note.
    """
    begin, are_silent = time.monotonic(), False
    while hangs_of_others(run, None, since=since):
        noted = {note.rank for note in run.failures(run.newest_attempt())}
        states = {rank: process_state(pid) for rank, pid in pids.items() if rank not in noted}
        quiet = [rank for rank, state in states.items() if state not in ("Z", None)]
        waited = time.monotonic() - begin
        # A stopped process will write nothing: do not wait for it.
        if quiet and (waited >= ANSWER_SECONDS or all(states[rank] in STOPPED for rank in quiet)):
            for rank in quiet:
                are_silent |= note_silence(run, rank, pids[rank], since=since)
        elif not quiet and (world is None or len(noted) >= world):
            break
        if waited >= 2 * ANSWER_SECONDS:
            break
        time.sleep(_POLL_SECONDS)
    return are_silent


def note_silence(run: RunFolder, rank: int, pid: int, *, since: float) -> bool:
    """Note that a rank does not answer, if others hang and it has no note; return whether a note was written."""
    others = hangs_of_others(run, rank, since=since)
    attempt = run.newest_attempt()
    if not others or any(note.rank == rank for note in run.failures(attempt)):
        return False
    state = process_state(pid)
    if state in ("R", "S", "D"):
        # SIGUSR1 makes the process write its stacks, by faulthandler, which does not need the GIL.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACKS_SECONDS)
    why = STATES.get(state or "", "nothing is known of its process")
    run.write_failure(
        Outcome(
            kind=OutcomeKind.HANG,
            step=min(note.step for note in others),
            rank=rank,
            attempt=attempt,
            cause=f"{_what_hangs(others)}: rank {rank} does not answer: {why}{_advice(others)}",
        )
    )
    return True


def judged(notes: Collection[Outcome], world: int, records: Mapping[int, HangRecord] | None = None) -> Outcome:
    """The outcome of an attempt from its ranks' notes: the first cause, and for a hang the verdict of the diagnosis.

    Args:
        records: of the hang, by rank. Without records, the note of a rank that does not wait for others names the rank.
    """
    first, has_to_name = first_cause(notes), True
    diagnosis: Diagnosis | None = None
    hung = [note for note in notes if note.kind is OutcomeKind.HANG]
    is_hang = first.kind is OutcomeKind.HANG
    if not records:
        if is_hang and (first.echo or is_silent(first)):
            diagnosis = diagnosis_of(notes, world, {})
    # A rank that ended with exit code 0 left the others silently.
    elif is_hang or first.echo or first.exit_code == 0:
        diagnosis, has_to_name = diagnosis_of(notes, world, records), False
    elif first.exit_code == -signal.SIGABRT or "gloo" in (first.cause or ""):
        # If sizes differ, gloo ends the process that receives the message, or raises there; the sender is at fault.
        diagnosis = different_calls(records) or odd_calls(records, first.rank or 0)
        if diagnosis is not None:
            diagnosis = replace(diagnosis, verdict=f"{diagnosis.verdict}; rank {first.rank}: {first.cause}")
    if diagnosis is None or (has_to_name and not diagnosis.ranks):
        if first.echo and 1 < len(hung) == world and len({note.step for note in hung}) == 1:
            places = ", ".join(
                f"rank {note.rank} {(note.cause or '').partition(f'rank {note.rank} waits ')[2].partition(';')[0]}"
                for note in sorted(hung, key=lambda note: note.rank or 0)[:_MOST_NAMED]
            )
            cause = f"{_what_hangs(hung)}: all {world} ranks wait for each other: {places}{_advice(hung)}"
            return replace(first, rank=None, cause=cause)
        return first
    cause = f"{_what_hangs(hung)}: {diagnosis.verdict}{_advice(hung)}" if hung else diagnosis.verdict
    if not diagnosis.ranks:
        return replace(first, rank=None, cause=cause, echo=False)
    note = next((note for note in notes if note.rank == diagnosis.ranks[0]), None)
    if note is None or is_silent(note):
        return replace(first, rank=diagnosis.ranks[0], cause=cause, traceback=None, exit_code=None, echo=False)
    return replace(note, kind=first.kind, cause=cause, echo=False)


def diagnosis_of(notes: Collection[Outcome], world: int, records: Mapping[int, HangRecord]) -> Diagnosis:
    """The diagnosis of an attempt whose ranks hung, or lost their connection to a rank."""
    silent = {
        note.rank: (note.cause or "").partition("does not answer: ")[2].partition(";")[0] or "nothing is known of it"
        for note in notes
        if note.rank is not None and is_silent(note)
    }
    ended = {
        note.rank: note.cause or note.kind.meaning
        for note in notes
        if note.rank is not None and note.kind is not OutcomeKind.HANG and not note.echo
    }
    if not any(note.kind is OutcomeKind.HANG for note in notes):
        # The processes of ranks without a note were not examined; other ranks lost their connection to them.
        noted = {note.rank for note in notes} | set(records)
        ended |= {rank: "its process is gone and has left no record" for rank in range(world) if rank not in noted}
    unread = {note.rank for note in notes if note.rank is not None} - set(records) - set(silent) - set(ended)
    return diagnose(records, world=world, silent=silent, ended=ended, unread=unread)


def _what_hangs(notes: Sequence[Outcome]) -> str:
    """`step 3 did not end within 600 s`, from the note of a rank that reached its own limit."""
    # Ranks may be in different steps: the earliest step is the one that does not end.
    for note in sorted(notes, key=lambda note: note.step):
        event, colon, _ = (note.cause or "").partition(f": rank {note.rank}")
        if colon and "another rank reached" not in event:
            return event
    return "a step did not end in time"


def _advice(notes: Sequence[Outcome]) -> str:
    """Step times and the key of the limit, from the first note that has them."""
    texts = [(note.cause or "").partition(": rank ")[2].partition("; ")[2] for note in notes]
    text = next((text for text in texts if "timeout_seconds=" in text), "")
    return f"; {text}" if text else ""


@dataclass(frozen=True, kw_only=True)
class HungAttempt:
    """The records of an attempt and their diagnosis."""

    diagnosis: Diagnosis
    records: Mapping[int, HangRecord]
    others: Mapping[int, str]
    damaged: Mapping[int, str]
    world: int


def has_hung(run: RunFolder, attempt: int) -> bool:
    """Whether ranks of an attempt have noted that they hang."""
    return any(note.kind is OutcomeKind.HANG for note in run.failures(attempt))


def hung_attempt(run: RunFolder, attempt: int) -> HungAttempt:
    """Read and diagnose the records of an attempt that hung."""
    records, damaged = read_hang(run, attempt)
    notes = run.failures(attempt)
    world = world_of(run, attempt)
    others = {
        note.rank: (note.cause or "").rpartition(f"rank {note.rank} ")[2].partition(";")[0] or note.kind.meaning
        for note in notes
        if note.rank is not None and note.rank not in records
    }
    diagnosis = diagnosis_of(notes, world, records)
    return HungAttempt(diagnosis=diagnosis, records=records, others=others, damaged=damaged, world=world)


def world_of(run: RunFolder, attempt: int) -> int:
    """Number of ranks of an attempt; 0 if its config does not say."""
    try:
        world = run.config(attempt).get("world")
    except ConfigError:
        return 0
    return world if isinstance(world, int) and not isinstance(world, bool) and 0 < world <= _MOST_RANKS else 0
