"""A sweep's rows in words: cells, counts and causes; the same on a terminal, in a pipe and in a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titanlab.launch.contract import UNANSWERED
from titanlab.records.outcome import OutcomeKind
from titanlab.terminal.numerals import counted, duration, grouped

Row = Mapping[str, Any]

ACTIVE = ("starting", "running", "saving")
# A scheduler's words for the end of a job that did not exit with 0.
_BAD_ENDS = frozenset("BOOT_FAIL CANCELLED DEADLINE FAILED GONE NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split())
# States in the order in which a person wants to see them counted; ends come before, by outcome.
_STATES = (*ACTIVE, "queued", "prepared", "missing", "unreadable")
# A run that logs nothing for so long may be in a long step, or gone.
UNANSWERED_SECONDS = 300.0
HEADINGS = ("run", "layout", "state", "step", "tok/s", "MFU", "GiB", "left", "")
# Columns of figures, which stand at the right.
FIGURES = ("step", "tok/s", "MFU", "GiB", "left")
OVERSUBSCRIBED = "* oversubscribed: more processes than cores, so that the speed says nothing"
_REASONS = 5
_GAPS = 5


def cells(row: Row, *, now: float) -> tuple[str, ...]:
    """One row's texts, under HEADINGS; empty where there is nothing to say.

    Args:
        now: seconds since the epoch, to tell silence by.
    """
    speed, mfu = row["tokens_per_second"], row["mfu_percent"]
    memory, left = row["memory_gib"], row["seconds_left"]
    return (
        row["run"] or "",
        row["layout.label"] or "",
        word(row),
        f"{row['step']}/{row['steps']}" if row["steps"] and row["step"] is not None else "",
        "" if speed is None else grouped(speed) + ("*" if row["oversubscribed"] else ""),
        "" if mfu is None else f"{mfu:.1f}%",
        "" if memory is None else f"{memory:.2f}",
        "" if left is None or row["state"] not in ACTIVE else duration(left),
        _note(row, now),
    )


def word(row: Row) -> str:
    """A run's state in one word: how it ended, once it has."""
    return str(row["outcome"] or row["state"]) if row["state"] == "ended" else str(row["state"])


def tone(row: Row) -> str:
    """What a person should feel: `good`, `busy`, `idle`, `halted` or `bad`."""
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
    """All but the points that were dropped."""
    return [row for row in rows if row["state"] != "dropped"]


def counts(rows: Iterable[Row]) -> str:
    """How many there are of each end and state: `12 runs: 8 done, 1 oom, 2 running, 1 queued`."""
    shown = runs(rows)
    found = Counter(word(row) for row in shown)
    order = [*(kind.value for kind in OutcomeKind), *_STATES]
    parts = [f"{found[name]} {name}" for name in order if found[name]]
    return counted(len(shown), "run") + (": " + ", ".join(parts) if parts else "")


def dropped(rows: Iterable[Row]) -> list[str]:
    """How many points were dropped, by stage, and the most frequent reasons; nothing where none was."""
    reasons = Counter((row["dropped_stage"], row["cause"]) for row in rows if row["state"] == "dropped")
    if not reasons:
        return []
    stages: Counter[str] = Counter()
    for (stage, _), count in reasons.items():
        stages[stage] += count
    by_stage = ", ".join(f"{count} by {stage}" for stage, count in stages.most_common())
    lines = [f"{counted(sum(stages.values()), 'point')} dropped: {by_stage}"]
    lines += [f"  {count} × {reason}" for (_, reason), count in reasons.most_common(_REASONS)]
    if len(reasons) > _REASONS:
        lines.append(f"  … and {len(reasons) - _REASONS} more reasons, which `titanlab collect` lists")
    return lines


def failures(rows: Iterable[Row]) -> list[str]:
    """One line for each run that has ended otherwise than done, or whose scheduler says so: which, how, where, why."""
    lines = []
    for row in rows:
        doubt = _doubt(row)
        if row["state"] == "ended" and row["outcome"] == OutcomeKind.DONE.value:
            lines += [f"{row['run']}: done{doubt}"] if doubt else []
            continue
        if row["state"] not in ("ended", "missing", "unreadable"):
            continue
        where = [f"rank {row['rank']}"] if row["rank"] is not None else []
        # Some causes begin with it.
        where += [f"step {row['step']}"] if row["step"] and not str(row["cause"]).startswith("step ") else []
        cause = f": {row['cause']}" if row["cause"] else ""
        lines.append(f"{row['run']}: {', '.join([word(row), *where])}{cause}{doubt}")
    return lines


def gaps(rows: Iterable[Row], *, most: int = _GAPS) -> list[str]:
    """What the trackers of runs lack, a line each, and how many more there are."""
    lacking = [row for row in rows if row["tracker_gap"]]
    lines = [f"{row['run']}: {row['tracker_gap']}" for row in lacking[:most]]
    if len(lacking) > most:
        runs_left = counted(len(lacking) - most, "run")
        lines.append(f"… and {runs_left} more; titanlab sync --rebuild {lacking[0]['sweep']} sees to all of them")
    return lines


def _doubt(row: Row) -> str:
    """What the scheduler says of a run that has ended, where that is the contrary of what the run says."""
    state, done = row["scheduler_state"], row["outcome"] == OutcomeKind.DONE.value
    if row["state"] == "ended" and (state in _BAD_ENDS if done else state == "COMPLETED"):
        return f"; the scheduler says {state}"
    return ""


def aligned(headings: Sequence[str], lines: Sequence[Sequence[str]], *, right: Iterable[str] = ()) -> list[str]:
    """Plain lines whose columns stand under each other; columns without any text are left out.

    Args:
        right: headings of the columns that stand at the right.
    """
    lines = levelled(lines)
    kept = [place for place in range(len(headings)) if any(line[place] for line in lines)]
    widths = {place: max(len(line[place]) for line in [headings, *lines]) for place in kept}

    def line_of(texts: Sequence[str]) -> str:
        parts = [
            texts[place].rjust(widths[place]) if headings[place] in right else texts[place].ljust(widths[place])
            for place in kept
        ]
        return "  ".join(parts).rstrip()

    return [line_of(headings), *map(line_of, lines)]


def levelled(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """The lines with a space after figures that others of their column have a mark after, so that digits meet."""
    marked = {place for line in lines for place, cell in enumerate(line) if cell.endswith("*")}
    return [
        [cell + " " if place in marked and cell and not cell.endswith("*") else cell for place, cell in enumerate(line)]
        for line in lines
    ]


def text(name: str, rows: Sequence[Row], *, now: float) -> str:
    """Everything about a sweep as plain lines, for a pipe or a log."""
    shown = runs(rows)
    lines = [name]
    if shown:
        lines += [f"  {line}" for line in aligned(HEADINGS, [cells(row, now=now) for row in shown], right=FIGURES)]
    return "\n".join([*lines, *beneath(rows)])


def beneath(rows: Sequence[Row], *, most: int | None = None) -> list[str]:
    """What stands beneath the table: legend, counts, causes, dropped points.

    Args:
        most: causes at most; None: all.
    """
    lines = [OVERSUBSCRIBED] if any(row["oversubscribed"] for row in rows) else []
    lines.append(counts(rows))
    # One line: it is the same for all of its jobs, and some of them go on.
    lines += sorted(
        {row["queue_reason"] for row in rows if row["scheduler_state"] == UNANSWERED and row["queue_reason"]}
    )
    causes = failures(rows)
    shown = causes if most is None else causes[:most]
    lines += [f"  {line}" for line in shown]
    if len(shown) < len(causes):
        lines.append(f"  … and {len(causes) - len(shown)} more")
    return lines + gaps(rows, most=_GAPS if most is None else min(most, _GAPS)) + dropped(rows)


def _note(row: Row, now: float) -> str:
    notes = []
    if row["state"] in ACTIVE and row["updated"] and now - row["updated"] > UNANSWERED_SECONDS:
        notes.append(f"silent for {duration(now - row['updated'])}")
    if row["queue_reason"] and row["scheduler_state"] != UNANSWERED:
        notes.append(row["queue_reason"])
    if row["previous_outcome"]:
        notes.append(f"attempt {row['attempt']}, after {row['previous_outcome']}")
    if row["stale"]:
        notes.append("made by other code")
    return ", ".join(notes)
