"""One run of a sweep as text: the facts of its row, and the traceback or log of the rank that failed."""

from __future__ import annotations

import time
from pathlib import Path

from titanlab.ac.block_schema import NoCheckpointing
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.table.listing import Row, word
from titanlab.terminal.numerals import counted, duration, grouped

# The part of a log that is shown if a failed rank left no traceback.
_LOG_LINES = 30
_LOG_BYTES = 50_000


def details(row: Row) -> list[tuple[str, object]]:
    """The row's known facts as (label, value)."""
    speed, mfu = row["tokens_per_second"], row["mfu_percent"]
    speed_text = "" if speed is None else f"{grouped(speed)} tokens/s per device"
    speed_text += "" if mfu is None else f", MFU {mfu:.1f}%"
    speed_text += " (oversubscribed: more processes than cores)" if speed_text and row["oversubscribed"] else ""
    techniques = [
        row[name] for name in ("precision", "ac", "schedule") if row[name] not in (None, NoCheckpointing.kind)
    ]
    techniques += [f"compiled {row['compile']}"] if row["compile"] not in (None, "off") else []
    job = [str(row[name]) for name in ("launcher", "job_id", "scheduler_state") if row[name]]
    facts: list[tuple[str, object]] = [
        ("state", word(row)),
        ("cause", row["cause"]),
        ("rank", row["rank"]),
        ("exit code", row["exit_code"]),
        ("step", None if row["step"] is None else f"{row['step']} of {row['steps']}"),
        ("attempt", _attempt(row)),
        ("began from", f"step {row['parent_step']} of {row['parent_run']}" if row["parent_run"] else None),
        ("time left", None if row["seconds_left"] is None else duration(row["seconds_left"])),
        (
            "layout",
            f"{row['layout.label']}, {counted(row['world'], 'process', 'processes')} on {row['device']}"
            if row["world"]
            else None,
        ),
        ("techniques", ", ".join(techniques)),
        ("loss", None if row["loss"] is None else f"{row['loss']:.4f}"),
        ("validation loss", None if row["validation_loss"] is None else f"{row['validation_loss']:.4f}"),
        ("speed", speed_text),
        ("memory", None if row["memory_gib"] is None else f"{row['memory_gib']:.2f} GiB"),
        ("job", " ".join(job)),
        ("waits for", row["queue_reason"]),
        ("started", _moment(row["started"])),
        ("ended", _moment(row["ended"])),
        ("tracker", row["tracker_gap"]),
        ("code", "other than what is here now" if row["stale"] else None),
        ("folder", row["folder"]),
    ]
    return [(label, value) for label, value in facts if value not in (None, "")]


def failure_text(run: RunFolder, row: Row) -> tuple[str, str] | None:
    """The source and text of the failed rank's traceback, or of the end of its log; None if the run did not fail."""
    # A stopped run has saved, and has nothing to explain.
    if row["state"] != "ended" or row["outcome"] in (None, "done", "cancelled", "preempted", "walltime"):
        return None
    outcome, rank = run.result(), row["rank"]
    if outcome is not None and outcome.traceback:
        return f"traceback of rank {rank or 0}", outcome.traceback.rstrip()
    for note in run.failures(row["attempt"]):
        if note.rank == rank and note.traceback:
            return f"traceback of rank {rank or 0}", note.traceback.rstrip()
    log = run.logs / f"rank-{rank or 0}.log"
    end = _end_of(log)
    return (f"end of {log}", end) if end else None


def _attempt(row: Row) -> object:
    if not row["attempt"]:
        return None
    return f"{row['attempt']}, after {row['previous_outcome']}" if row["previous_outcome"] else row["attempt"]


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_LOG_LINES:])
