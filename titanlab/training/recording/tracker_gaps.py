"""Data that a run's tracker lacks, in one line with the command that adds it; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from titanlab.records.run_folder import RunFolder
from titanlab.terminal.paths import shown_path
from titanlab.tracker.record import FINISHED, Record, records_in
from titanlab.tracker.wandb_files import is_uploaded, offline_files
from titanlab.training.recording.tracked_run import records

_WANDB = "wandb"


def tracker_gap(run: RunFolder) -> str | None:
    """A line on what the trackers of an ended run lack; None if they are complete, or if there are none.

    It reads only records unless something is missing.
    """
    rebuilt = records_in(run.path)
    gaps = [_gap(run, kind, attempts, rebuilt.get(kind)) for kind, attempts in records(run).items()]
    return " · ".join(gap for gap in gaps if gap is not None) or None


def _gap(run: RunFolder, kind: str, by_attempt: Mapping[int, Record], rebuilt: Record | None) -> str | None:
    if rebuilt is not None and rebuilt.state != FINISHED:
        rebuilt = None
    if rebuilt is not None:
        by_attempt = {attempt: record for attempt, record in by_attempt.items() if attempt > rebuilt.attempt}
    unfinished = {attempt: record for attempt, record in by_attempt.items() if record.state != FINISHED}
    all_records = [*by_attempt.values(), *([] if rebuilt is None else [rebuilt])]
    if unfinished:
        gap = _unfinished(run, unfinished)
    elif left_out := sum(record.left_out for record in by_attempt.values()):
        gap = f"lacks {left_out} rows, for it could not keep up"
    elif any(record.wanted == "online" for record in all_records) and waiting_files(run):
        return f"{kind}: written offline, not uploaded; titanlab sync {shown_path(run.path)}"
    else:
        return None
    return f"{kind}: {gap}; titanlab sync --rebuild {shown_path(run.path)}"


def waiting_files(run: RunFolder) -> list[Path]:
    """Files of wandb that were not uploaded, or not completely, in the order of their steps."""
    attempts = records(run).get(_WANDB, {})
    # An online run that ended abruptly may have rows that were not uploaded.
    unfinished = [
        file
        for record in attempts.values()
        if record.mode == "online" and record.state != FINISHED and _is_inside(record.folder)
        for file in (run.path / record.folder).glob("run-*.wandb")
    ]
    files = {*offline_files(run.path), *unfinished}
    # The names of wandb's folders begin with a time, and hosts' clocks may differ.
    places = {record.folder: attempt for attempt, record in attempts.items()}
    return sorted(
        (file for file in files if not is_uploaded(file)),
        key=lambda file: (places.get(str(file.parent.relative_to(run.path)), 0), file.parent.name.partition("run-")[2]),
    )


def _is_inside(folder: str | None) -> TypeGuard[str]:
    """Whether a recorded folder is one of the run: the record may be a stranger's, and its files are uploaded."""
    return folder is not None and not Path(folder).is_absolute() and ".." not in Path(folder).parts


def has_repeated_steps(run: RunFolder) -> bool:
    """Whether files of wandb that wait have steps twice: an attempt went over steps again that an earlier one had.

    wandb keeps the first row of a step that it gets; the run counts the last.
    """
    waiting = {str(file.parent.relative_to(run.path)) for file in waiting_files(run)}
    attempts = {attempt: record for attempt, record in records(run).get(_WANDB, {}).items() if record.folder in waiting}
    begins = {row["attempt"]: row["step"] for row in run.metrics("attempt")} if len(attempts) > 1 else {}
    return any(
        earlier.step is not None and earlier.step > begins.get(attempt, earlier.step)
        for attempt in attempts
        for before, earlier in attempts.items()
        if before < attempt
    )


def _unfinished(run: RunFolder, unfinished: Mapping[int, Record]) -> str:
    """The part that is missing from attempts whose tracker was not closed."""
    last = max((row["step"] for row in run.metrics() if row["attempt"] in unfinished), default=None)
    taken = max((record.step for record in unfinished.values() if record.step is not None), default=None)
    if last is None or (taken is not None and taken >= last):
        return "was not closed, and may lack the last rows"
    return (
        f"has at least the steps up to {taken} of {last}" if taken is not None else f"has perhaps none of {last} steps"
    )
