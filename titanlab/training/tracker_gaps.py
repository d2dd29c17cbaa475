"""Data that a run's tracker lacks, in one line with the command that adds it; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from titanlab.records.run_folder import RunFolder
from titanlab.terminal.paths import shown_path
from titanlab.tracker.record import FILE, FINISHED, Record, read_record
from titanlab.tracker.wandb_files import is_uploaded, offline_files
from titanlab.training.tracked_run import records


def tracker_gap(run: RunFolder) -> str | None:
    """A line on what the tracker of an ended run lacks; None if it is complete, or if there is no tracker.

    It reads only records unless something is missing.
    """
    by_attempt, rebuilt = records(run), rebuilt_record(run)
    if rebuilt is not None:
        by_attempt = {attempt: record for attempt, record in by_attempt.items() if attempt > rebuilt.attempt}
    unfinished = {attempt: record for attempt, record in by_attempt.items() if record.state != FINISHED}
    all_records = [*by_attempt.values(), *([] if rebuilt is None else [rebuilt])]
    kind = next((record.kind for record in all_records), "")
    if unfinished:
        gap = _unfinished(run, unfinished)
    elif left_out := sum(record.left_out for record in by_attempt.values()):
        gap = f"lacks {left_out} rows, for it could not keep up"
    elif any(record.wanted == "online" for record in all_records) and waiting_files(run):
        return f"{kind}: written offline, not uploaded; titanlab sync {shown_path(run.path)}"
    else:
        return None
    return f"{kind}: {gap}; titanlab sync --rebuild {shown_path(run.path)}"


def rebuilt_record(run: RunFolder) -> Record | None:
    """The record of the latest rebuild from metrics.jsonl; None if there was none."""
    record = read_record(run.path / FILE)
    return record if record is not None and record.state == FINISHED else None


def waiting_files(run: RunFolder) -> list[Path]:
    """Files of wandb that were not uploaded, or not completely, oldest first."""
    # An online run that ended abruptly may have rows that were not uploaded.
    unfinished = [
        file
        for record in records(run).values()
        if record.mode == "online" and record.state != FINISHED and record.folder is not None
        for file in (run.path / record.folder).glob("run-*.wandb")
    ]
    return [file for file in sorted({*offline_files(run.path), *unfinished}) if not is_uploaded(file)]


def _unfinished(run: RunFolder, unfinished: Mapping[int, Record]) -> str:
    """The part that is missing from attempts whose tracker was not closed."""
    last = max((row["step"] for row in run.metrics() if row["attempt"] in unfinished), default=None)
    taken = max((record.step for record in unfinished.values() if record.step is not None), default=None)
    if last is None or (taken is not None and taken >= last):
        return "was not closed, and may lack the last rows"
    return (
        f"has at least the steps up to {taken} of {last}" if taken is not None else f"has perhaps none of {last} steps"
    )
