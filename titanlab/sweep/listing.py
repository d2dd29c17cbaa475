"""Formats the rows of a sweep, of all sweeps in a folder, or of one run as text for terminals, pipes and logs."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.launch import UNANSWERED
from titanlab.records import STATES, OutcomeKind, RunFolder, list_runs, text_at_end
from titanlab.sweep.reconcile import ACTIVE, close_dead_runs
from titanlab.sweep.rows import POINT, point_keys
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of
from titanlab.system import aligned, counted, duration, grouped
from titanlab.techniques.ac.recomputation_schema import NoCheckpointing

Row = Mapping[str, Any]

# States that a scheduler gives to jobs that did not end with exit code 0.
_BAD_ENDS = frozenset("BOOT_FAIL CANCELLED DEADLINE FAILED GONE NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split())
# States in the order in which their counts are shown; outcomes of ended runs come before them.
_STATES = (*ACTIVE, "queued", "prepared", "missing", "unreadable")
# A run that has logged nothing for this time may be in a long step, or dead.
UNANSWERED_SECONDS = 300.0
HEADINGS = ("run", "layout", "state", "step", "tok/s", "MFU", "GiB", "left", "")
# Columns of numbers, aligned to the right.
FIGURES = ("step", "tok/s", "MFU", "GiB", "left")
OVERSUBSCRIBED = "* oversubscribed: more processes than cores, so that the speed says nothing"
_REASONS = 5
_GAPS = 5


def cells(row: Row, *, now: float) -> tuple[str, ...]:
    """One row as texts, one for each of HEADINGS; a text is empty if its value is unknown.

    Args:
        now: seconds since the epoch, to detect runs that log nothing.
    """
    speed, mfu = row["tokens_per_second"], row["mfu_percent"]
    memory, left = row["memory_gib"], row["seconds_left"]
    is_active = row["state"] in ACTIVE
    silent = now - row["updated"] if is_active and row["updated"] else 0.0
    notes = [
        "control" if row["control"] else "",
        row["cause"] if is_active and row["cause"] else "",
        f"silent for {duration(silent)}" if silent > UNANSWERED_SECONDS and not row["cause"] else "",
        row["queue_reason"] if row["queue_reason"] and row["scheduler_state"] != UNANSWERED else "",
        f"attempt {row['attempt']}, after {row['previous_outcome']}" if row["previous_outcome"] else "",
        "made by other code" if row["stale"] else "",
    ]
    return (
        row["run"] or "",
        row["layout.label"] or "",
        state_word(row),
        f"{row['step']}/{row['steps']}" if row["steps"] and row["step"] is not None else "",
        "" if speed is None else grouped(speed) + ("*" if row["oversubscribed"] else ""),
        "" if mfu is None else f"{mfu:.1f}%",
        "" if memory is None else f"{memory:.2f}",
        "" if left is None or not is_active else duration(left),
        ", ".join(filter(None, notes)),
    )


def state_word(row: Row) -> str:
    """A run's state in one word; its outcome if it has ended."""
    return str(row["outcome"] or row["state"]) if row["state"] == "ended" else str(row["state"])


def state_tone(row: Row) -> str:
    """The kind of a state, for its colour: `good`, `busy`, `idle`, `halted` or `bad`."""
    state = row["state"]
    if state in ACTIVE:
        return "busy"
    if state in ("missing", "unreadable"):
        return "bad"
    if state != "ended" or row["outcome"] is None:
        return "idle"
    kind = OutcomeKind(row["outcome"])
    if kind is OutcomeKind.DONE:
        return "good"
    return "halted" if kind.automatic or kind is OutcomeKind.CANCELLED else "bad"


def runs(rows: Iterable[Row]) -> list[Row]:
    """All rows except those of dropped points."""
    return [row for row in rows if row["state"] != "dropped"]


def state_counts(rows: Iterable[Row]) -> str:
    """The number of runs of each outcome and state: `12 runs: 8 done, 1 oom, 2 running, 1 queued`."""
    shown = runs(rows)
    counter = Counter(state_word(row) for row in shown)
    order = [*(kind.value for kind in OutcomeKind), *_STATES]
    parts = [f"{counter[name]} {name}" for name in order if counter[name]]
    return counted(len(shown), "run") + (": " + ", ".join(parts) if parts else "")


def dropped(rows: Iterable[Row]) -> list[str]:
    """The number of dropped points by stage, and the most frequent reasons; empty if none was dropped."""
    rows = list(rows)
    reasons = Counter((row["dropped_stage"], row["cause"]) for row in rows if row["state"] == "dropped")
    if not reasons:
        return []
    stages = Counter(row["dropped_stage"] for row in rows if row["state"] == "dropped")
    by_stage = ", ".join(f"{count} by {stage}" for stage, count in stages.most_common())
    lines = [f"{counted(sum(stages.values()), 'point')} dropped: {by_stage}"]
    lines += [f"  {count} × {reason}" for (_, reason), count in reasons.most_common(_REASONS)]
    if len(reasons) > _REASONS:
        lines.append(f"  … and {len(reasons) - _REASONS} more reasons, which `titanlab collect` lists")
    return lines


def failures(rows: Iterable[Row]) -> list[str]:
    """A line for each run that failed, or whose scheduler contradicts its outcome: run, outcome, rank, step, cause."""
    lines = []
    for row in rows:
        has_ended, is_done = row["state"] == "ended", row["outcome"] == OutcomeKind.DONE.value
        state = row["scheduler_state"]
        is_contradicted = has_ended and (state in _BAD_ENDS if is_done else state == "COMPLETED")
        contradiction = f"; the scheduler says {state}" if is_contradicted else ""
        if has_ended and is_done:
            lines += [f"{row['run']}: done{contradiction}"] if contradiction else []
        elif row["state"] in ("ended", "missing", "unreadable"):
            where = [f"rank {row['rank']}"] if row["rank"] is not None else []
            # Some causes begin with the step already: do not add it twice.
            where += [f"step {row['step']}"] if row["step"] and not str(row["cause"]).startswith("step ") else []
            cause = f": {row['cause']}" if row["cause"] else ""
            lines.append(f"{row['run']}: {', '.join([state_word(row), *where])}{cause}{contradiction}")
    return lines


def gaps(rows: Iterable[Row], *, most: int = _GAPS) -> list[str]:
    """One line for each of the first `most` runs whose tracker lacks data, and one with the number of the others."""
    lacking = [row for row in rows if row["tracker_gap"]]
    lines = [f"{row['run']}: {row['tracker_gap']}" for row in lacking[:most]]
    if len(lacking) > most:
        runs_left = counted(len(lacking) - most, "run")
        lines.append(f"… and {runs_left} more; titanlab sync --rebuild {lacking[0]['sweep']} sees to all of them")
    return lines


def text(name: str, rows: Sequence[Row], *, now: float) -> str:
    """A whole sweep as plain lines, for a pipe or a log."""
    shown = runs(rows)
    lines = [name]
    if shown:
        lines += [f"  {line}" for line in aligned(HEADINGS, [cells(row, now=now) for row in shown], right=FIGURES)]
    return "\n".join([*lines, *beneath(rows)])


def beneath(rows: Sequence[Row], *, most: int | None = None) -> list[str]:
    """The lines below the table: legend, counts, causes, dropped points."""
    lines = [OVERSUBSCRIBED] if any(row["oversubscribed"] for row in rows) else []
    lines.append(state_counts(rows))
    # If the scheduler does not answer, the reason is the same for all its jobs: show the reason once.
    lines += sorted(
        {row["queue_reason"] for row in rows if row["scheduler_state"] == UNANSWERED and row["queue_reason"]}
    )
    causes = failures(rows)
    shown = causes if most is None else causes[:most]
    lines += [f"  {line}" for line in shown]
    if len(shown) < len(causes):
        lines.append(f"  … and {len(causes) - len(shown)} more")
    return lines + gaps(rows, most=_GAPS if most is None else min(most, _GAPS)) + dropped(rows)


def overview(runs: Path | str) -> list[dict[str, Any]]:
    """The sweeps under a folder, latest first. Also writes a result for each run without a job whose process has died.

    Returns:
        for each sweep `sweep`, `runs`, `states` (counts by outcome or state), `dropped`, `updated` and `folder`.
    """
    by_sweep: dict[Path, list[RunFolder]] = {}
    for run in list_runs(runs):
        by_sweep.setdefault(run.path.parent, []).append(run)
    rows = [_row(SweepFolder(path), members) for path, members in by_sweep.items()]
    return sorted(rows, key=lambda row: row["updated"] or 0.0, reverse=True)


def overview_lines(rows: Sequence[Row], runs: Path | str, *, now: float) -> list[str]:
    """The overview as plain lines."""
    if not rows:
        return [f"no runs under {runs}: submit a sweep (titanlab sweep), or say where runs are (--runs FOLDER)"]
    lines = [
        [
            row["sweep"],
            str(row["runs"]),
            ", ".join(f"{count} {word}" for word, count in row["states"].items()),
            str(row["dropped"] or ""),
            "" if row["updated"] is None else f"{duration(now - row['updated'])} ago",
        ]
        for row in rows
    ]
    headings = ("sweep", "runs", "of which", "dropped", "last heard of")
    return aligned(headings, lines, right=("runs", "dropped", "last heard of"))


def _row(sweep: SweepFolder, members: list[RunFolder]) -> dict[str, Any]:
    close_dead_runs(sweep, jobs_of(sweep, sweep.submissions()))
    statuses, words = [], Counter[str]()
    for run in members:
        try:
            status = run.status()
        except ConfigError:
            words["unreadable"] += 1
            continue
        statuses.append(status)
        words["prepared" if status is None else status.outcome or status.state] += 1
    dropped = 0
    try:
        dropped = sum(bool(point.get("dropped")) for point in sweep.points())
    except ConfigError:
        # points.jsonl is damaged; `titanlab status SWEEP` says so.
        words["unreadable"] += 1
    order = [*(kind.value for kind in OutcomeKind), *STATES]
    return {
        "sweep": sweep.name,
        "runs": len(members),
        "states": {word: words[word] for word in (*order, *words) if words[word]},
        "dropped": dropped,
        "updated": max((status.updated for status in statuses if status is not None), default=None),
        "folder": str(sweep.path),
    }


# How many lines at the end of a log are shown if a failed rank left no traceback.
_LOG_LINES = 30


def row_details(row: Row) -> list[tuple[str, object]]:
    """The row's known facts as (label, value)."""
    speed, mfu = row["tokens_per_second"], row["mfu_percent"]
    speed_text = "" if speed is None else f"{grouped(speed)} tokens/s per device"
    speed_text += "" if mfu is None else f", MFU {mfu:.1f}%"
    speed_text += " (oversubscribed: more processes than cores)" if speed_text and row["oversubscribed"] else ""
    techniques = [
        row[name] for name in ("precision", "ac", "schedule") if row[name] not in (None, NoCheckpointing.kind)
    ]
    techniques += [f"compiled {row['compile']}"] if row["compile"] not in (None, "off") else []
    attempt = f"{row['attempt']}, after {row['previous_outcome']}" if row["previous_outcome"] else row["attempt"]
    moments = {
        name: None if row[name] is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row[name]))
        for name in ("started", "ended")
    }
    job = [str(row[name]) for name in ("launcher", "job_id", "scheduler_state") if row[name]]
    facts: list[tuple[str, object]] = [
        ("state", state_word(row)),
        ("cause", row["cause"]),
        ("rank", row["rank"]),
        ("exit code", row["exit_code"]),
        ("step", None if row["step"] is None else f"{row['step']} of {row['steps']}"),
        ("attempt", attempt or None),
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
        *moments.items(),
        ("notes", " ".join(row["notes"].split()) if isinstance(row["notes"], str) else None),
        ("tracker", row["tracker_gap"]),
        ("code", "differs from the present code" if row["stale"] else None),
        ("folder", row["folder"]),
    ]
    return [(label, value) for label, value in facts if value not in (None, "")]


def failure_text(run: RunFolder, row: Row) -> tuple[str, str] | None:
    """The source and text of the failed rank's traceback, or of the end of its log; None if the run did not fail."""
    # A run that was asked to stop has not failed.
    if row["state"] != "ended" or row["outcome"] in (None, "done", "cancelled", "preempted", "walltime"):
        return None
    outcome, rank = run.result(), row["rank"]
    if outcome is not None and outcome.traceback:
        return f"traceback of rank {rank or 0}", outcome.traceback.rstrip()
    for note in run.failures(row["attempt"]):
        if note.rank == rank and note.traceback:
            return f"traceback of rank {rank or 0}", note.traceback.rstrip()
    log = run.logs / f"rank-{rank or 0}.log"
    lines = text_at_end(log).splitlines()[-_LOG_LINES:]
    return (f"end of {log}", "\n".join(lines)) if any(lines) else None


# Together with the layout, these columns define a recipe; a column is shown if it differs within the sweep.
_RECIPE = (
    *("model", "layers", "dim", "seq_len", "global_batch", "precision", "ac", "compile"),
    *("optimizer", "data", "accelerator", "device"),
)
# These follow from the layout, unless the user has set them.
_FOLLOWING = ("microbatch", "schedule")
_LAYOUT = ("layout.label", "world")
# Means of these columns are geometric, because speeds are compared as ratios.
SPEEDS = ("tokens_per_second", "tokens_per_second_all", "mfu_percent")
_FIGURES = ("processes", "tokens/s", "of all", "MFU", "GiB", "loss", "validation")
_FORMS: Mapping[str, Callable[[float], str]] = {
    "tokens_per_second": grouped,
    "tokens_per_second_all": grouped,
    "mfu_percent": "{:.1f}%".format,
    "memory_gib": "{:.2f}".format,
    "loss": "{:.4f}".format,
    "validation_loss": "{:.4f}".format,
}


@dataclass(frozen=True)
class RecipeRuns:
    """Runs of one recipe.

    Attributes:
        differing: the columns besides the layout in which the sweep's recipes differ, with this recipe's values.
    """

    layout: str
    world: int
    differing: Mapping[str, Any]
    rows: Sequence[Row]

    @property
    def label(self) -> str:
        """A short name: `dp_s2 · bf16 · microbatch 4`."""
        parts = [
            str(value) if isinstance(value, str) and not name.startswith(POINT) else f"{_short(name)} {_shown(value)}"
            for name, value in self.differing.items()
            if value is not None
        ]
        return " · ".join([self.layout, *parts])

    @property
    def is_control(self) -> bool:
        """Whether these are the runs of the sweep's control."""
        return any(row["control"] for row in self.rows)

    @property
    def is_oversubscribed(self) -> bool:
        """Whether a run had more processes than cores."""
        return any(row["oversubscribed"] for row in self.rows)

    @property
    def is_emulated(self) -> bool:
        """Whether the device lacks the precision's matrix products, and computes them in 32 bits."""
        return any(row.get("emulated") for row in self.rows)

    @property
    def has_speed(self) -> bool:
        """Whether the speed can be compared with that of other recipes."""
        return not (self.is_oversubscribed or self.is_emulated)

    def values(self, column: str) -> list[float]:
        """The values of a column, of the runs that are done; runs without a value are omitted."""
        return [row[column] for row in self.rows if row["outcome"] == "done" and row[column] is not None]

    def typical(self, column: str) -> float | None:
        """The geometric mean of a speed, and the median of another column, over the runs that are done."""
        known = self.values(column)
        if column in SPEEDS and known and min(known) > 0:
            return statistics.geometric_mean(known)
        return statistics.median(known) if known else None


def groups(rows: Iterable[Row]) -> list[RecipeRuns]:
    """The recipes of a sweep, in the order of their first runs; dropped points are omitted."""
    members_of: dict[tuple[Any, ...], list[Row]] = {}
    shown = [row for row in runs(rows) if row["layout.label"] is not None]
    # Include the swept keys: some, such as a learning rate, have no separate column. Repeats belong to one recipe.
    others = (*_FOLLOWING, *(name for name in point_keys(shown) if name != f"{POINT}repeat"))
    for row in shown:
        key = (bool(row["control"]), *(row[name] for name in (*_LAYOUT, *_RECIPE, *others)))
        members_of.setdefault(key, []).append(row)
    firsts = [members[0] for members in members_of.values()]
    differing = [name for name in _RECIPE if len({row[name] for row in firsts}) > 1]
    # The control is not a point of the space, so it does not decide which columns are shown.
    points = [row for row in firsts if not row["control"]]
    for name in others:
        # Show the column only if two lines would look the same without it.
        seen = (*_LAYOUT, *differing)
        distinct = {tuple(row[column] for column in seen) for row in points}
        if len(distinct) < len({tuple(row[column] for column in (*seen, name)) for row in points}):
            differing.append(name)
    return [
        RecipeRuns(row["layout.label"], row["world"], {name: row[name] for name in differing}, members)
        for row, members in zip(firsts, members_of.values(), strict=True)
    ]


def comparison(rows: Iterable[Row]) -> list[str]:
    """A line for each recipe: typical figures of its runs that are done, and outcomes of all. Empty without a run."""
    compared = groups(rows)
    if not compared:
        return []
    headings = ["layout", "processes", *map(_short, compared[0].differing), *_FIGURES[1:], "outcome"]
    lines = []
    for group in compared:
        figures = []
        for column, form in _FORMS.items():
            mark = "*" if group.is_oversubscribed and column.startswith("tokens") else ""
            figures.append("" if (value := group.typical(column)) is None else form(value) + mark)
        ends = Counter(map(state_word, group.rows))
        lines.append(
            [
                group.layout + (" (control)" if group.is_control else ""),
                str(group.world),
                *map(_shown, group.differing.values()),
                *figures,
                ", ".join(name if len(group.rows) == 1 else f"{count} {name}" for name, count in ends.items()),
            ]
        )
    text = aligned(headings, lines, right=_FIGURES)
    return [*text, OVERSUBSCRIBED] if any(group.is_oversubscribed for group in compared) else text


def _short(name: str) -> str:
    return name.removeprefix(POINT)


def _shown(value: object) -> str:
    if value is None:
        return ""
    return grouped(value) if isinstance(value, int) and not isinstance(value, bool) else str(value)
