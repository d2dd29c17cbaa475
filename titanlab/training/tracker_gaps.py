"""What a run's tracker lacks of it, in one line with the command that makes up for it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from titanlab.records.run_folder import RunFolder
from titanlab.terminal.paths import shown_path
from titanlab.tracker.record import FILE, FINISHED, Record, read_record
from titanlab.tracker.wandb_files import is_uploaded, offline_files
from titanlab.training.tracked_run import records


def tracker_gap(run: RunFolder) -> str | None:
    """What the tracker of a run that has ended lacks; None where it has all, or where there is none.

    Only records are read, unless something is missing.
    """
    found, rebuilt = records(run), rebuilt_record(run)
    if rebuilt is not None:
        found = {attempt: record for attempt, record in found.items() if attempt > rebuilt.attempt}
    open_ones = {attempt: record for attempt, record in found.items() if record.state != FINISHED}
    kind = next((record.kind for record in [*found.values(), *_one(rebuilt)]), "")
    if open_ones:
        what = _unfinished(run, open_ones)
    elif left_out := sum(record.left_out for record in found.values()):
        what = f"lacks {left_out} rows, for it could not keep up"
    elif any(record.wanted == "online" for record in [*found.values(), *_one(rebuilt)]) and waiting_files(run):
        return f"{kind}: written offline, not uploaded; titanlab sync {shown_path(run.path)}"
    else:
        return None
    return f"{kind}: {what}; titanlab sync --rebuild {shown_path(run.path)}"


def rebuilt_record(run: RunFolder) -> Record | None:
    """The record of what was written anew from metrics.jsonl; None where nothing was."""
    record = read_record(run.path / FILE)
    return record if record is not None and record.state == FINISHED else None


def waiting_files(run: RunFolder) -> list[Path]:
    """Files of wandb's that have not been uploaded, or not to their end, oldest first."""
    # One that went online and was cut short may have rows that have not arrived.
    cut = [
        file
        for record in records(run).values()
        if record.mode == "online" and record.state != FINISHED and record.folder is not None
        for file in (run.path / record.folder).glob("run-*.wandb")
    ]
    return [file for file in sorted({*offline_files(run.path), *cut}) if not is_uploaded(file)]


def _one(record: Record | None) -> list[Record]:
    return [] if record is None else [record]


def _unfinished(run: RunFolder, open_ones: Mapping[int, Record]) -> str:
    """What is missing of attempts that a tracker has not closed."""
    last = max((row["step"] for row in run.metrics() if row["attempt"] in open_ones), default=None)
    taken = max((record.step for record in open_ones.values() if record.step is not None), default=None)
    if last is None or (taken is not None and taken >= last):
        return "was not closed, and may lack the last rows"
    return (
        f"has at least the steps up to {taken} of {last}" if taken is not None else f"has perhaps none of {last} steps"
    )
