"""`titanlab schedule KIND`: show a pipeline schedule's timeline, idle time, and microbatches in flight."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.system import Console, aligned, counted, harmless, is_capable
from titanlab.techniques.schedule.action import Kind, Timeline
from titanlab.techniques.schedule.contract import PipelineSchedule, timeline_of
from titanlab.techniques.schedule.csv_schema import write_actions
from titanlab.techniques.schedule.plot import draw, rows

ALL = "all"
# The largest product of stages and microbatches; a larger timeline would take minutes.
LIMIT = 500_000
# The longest duration may be this many times the shortest. Columns of a picture are fractions of the shortest duration.
PROPORTION = 1000
TIMES = ("forward", "backward", "input", "weight", "transfer")
# Texts in errors about a recipe, and their replacements in errors of this command.
FLAGS = {
    "schedule.stages_per_rank": "--stages-per-rank",
    "schedule.file": "--file",
    "schedule=": "titanlab schedule ",
    "parallelism.pipeline=": "--ranks=",
}
_MOST_LISTED = 8  # With more ranks, not all peaks are listed.


class Made:
    """A schedule's timeline for some ranks and microbatches, and the texts that are printed about the timeline."""

    def __init__(self, kind: str, timeline: Timeline, microbatches: int) -> None:
        self.kind, self.timeline = kind, timeline
        ranks = len(timeline.events)
        self.stages = f"{len(timeline.placement) / ranks:.4g}"
        self.bubble = f"{100 * timeline.bubble_share:.1f} %"
        of, stages = counted(microbatches, "microbatch", "microbatches"), "stage" if self.stages == "1" else "stages"
        self.title = f"{kind}: {counted(ranks, 'rank')}, {of}, {self.stages} {stages} a rank"
        peaks = [f"{peak:.4g}" for peak in timeline.peak_in_flight]
        shown = peaks if ranks <= _MOST_LISTED else [*peaks[: _MOST_LISTED - 2], "…", peaks[-1]]
        self.peaks = " ".join(shown)


def schedule_verb(args: Namespace) -> int:
    backward = args.backward or 2.0
    durations = {
        Kind.FORWARD: args.forward or 1.0,
        Kind.BACKWARD: backward,
        Kind.INPUT: args.input or backward / 2,
        Kind.WEIGHT: args.weight or backward / 2,
    }
    _check_arguments(args, durations)
    made, refused = list[Made](), dict[str, ConfigError]()
    # A schedule that is read from a file is not compared: the file is for one pipeline.
    known = [str(kind) for kind in discover()["schedule"] if kind is not None and "file" not in _fields(kind)]
    for kind in known if args.kind == ALL else [args.kind]:
        try:
            made.append(_make(kind, args, durations))
        except ConfigError as error:
            if args.kind == ALL:
                refused[kind] = error
                continue
            # Name this command's flags instead of a recipe's keys; a recipe sets microbatches by batch sizes.
            cure = re.sub(r"training\.\w+ times \d+", "other --microbatches", error.cure)
            for name, flag in FLAGS.items():
                cure = cure.replace(name, flag)
            raise ConfigError(FLAGS.get(error.key, error.key), error.value, error.rule, cure) from error
    made.sort(key=lambda schedule: (schedule.timeline.duration, schedule.kind))
    if args.csv is not None:
        try:
            write_actions(args.csv, [[event.action for event in events] for events in made[0].timeline.events])
        except OSError as error:
            raise ConfigError("--csv", args.csv, f"cannot be written: {error.strerror}", "name another file") from error
    if args.plot is not None:
        draw([(f"{one.title} · bubble {one.bubble}", one.timeline) for one in made], args.plot)
    console = Console()
    console.note("\n".join(_lines(made, refused, durations, args)), coloured=True)
    for path, what in ((args.csv, "csv"), (args.plot, "plot")):
        if path is not None:
            console.note(f"{what}: {path}")
    return 0


def _check_arguments(args: Namespace, durations: Mapping[Kind, float]) -> None:
    kinds = [*sorted(str(kind) for kind in discover()["schedule"]), ALL]
    if args.kind not in kinds:
        near = "".join(f"try {kind}; " for kind in difflib.get_close_matches(args.kind, kinds, n=1))
        raise ConfigError("schedule", args.kind, "there is no such schedule", f"{near}known: {', '.join(kinds)}")
    for name, good in (("ranks", 4), ("microbatches", 8), ("stages_per_rank", 2)):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "must be at least 1", f"try {good}")
    size = (args.ranks or 4) * (args.microbatches or 8) * (args.stages_per_rank or 2)
    if size > LIMIT:
        rule = f"ranks × stages × microbatches is {size}, and a timeline has {LIMIT} at most"
        raise ConfigError("--microbatches", args.microbatches or 8, rule, "try fewer: the pattern repeats itself")
    typed = {name: getattr(args, name) for name in TIMES if getattr(args, name) is not None}
    for name, value in typed.items():
        sign = "not negative" if name == "transfer" else "positive"
        if not (0 < value < math.inf or (value == 0 and name == "transfer")):
            raise ConfigError(f"--{name}", value, f"must be finite and {sign}", "try 1")
    if max(*durations.values(), args.transfer or 0.0) > PROPORTION * min(durations.values()):
        # Name the typed duration that is furthest from 1.
        name = max(typed, key=lambda flag: abs(math.log(typed[flag] or 1.0)))
        rule = f"makes the longest duration more than {PROPORTION:,} times the shortest"
        raise ConfigError(f"--{name}", typed[name], rule, "try 1")
    if args.csv is not None and args.kind == ALL:
        raise ConfigError("--csv", args.csv, "holds one schedule", "name it instead of all: titanlab schedule 1f1b")
    if args.file is not None and (args.kind == ALL or "file" not in _fields(args.kind)):
        raise ConfigError("--file", args.file, "is for the schedule csv", "try titanlab schedule csv")


def _fields(kind: str) -> set[str]:
    return {field.name for field in dataclasses.fields(discover()["schedule"][kind].schema)}


def _make(kind: str, args: Namespace, durations: Mapping[Kind, float]) -> Made:
    """Make one schedule. If the user named it, a flag that this schedule does not use raises a ConfigError."""
    schema: Any = discover()["schedule"][kind].schema
    fields, values = _fields(kind), {}
    given, is_named = args.stages_per_rank, args.kind != ALL
    if given is not None and "stages_per_rank" in fields:
        values["stages_per_rank"] = given
        try:
            schema(**values)
        except ConfigError:
            if is_named:
                raise
            # When all are compared, a schedule with a fixed number of stages keeps its number.
            values = {}
    elif is_named and given not in (None, 1):
        rule = f"{kind} has one stage a rank" if "file" not in fields else "the file says which stages there are"
        cure = "leave it out, or try titanlab schedule interleaved_1f1b"
        raise ConfigError("--stages-per-rank", given, rule, cure)
    if "file" in fields:
        values["file"] = args.file or ""
    config: PipelineSchedule = schema(**values)
    usual = config.fixed_size() or (4, 8)
    ranks, microbatches = args.ranks or usual[0], args.microbatches or usual[1]
    config.check_pipeline(ranks=ranks, microbatches=microbatches)
    transfer = args.transfer or 0.0
    timeline = timeline_of(config, ranks=ranks, microbatches=microbatches, durations=durations, transfer=transfer)
    return Made(kind, timeline, microbatches)


def _lines(
    made: Sequence[Made], refused: Mapping[str, ConfigError], durations: Mapping[Kind, float], args: Namespace
) -> list[str]:
    """The picture of the schedule that the user named, or the table of all."""
    coloured = is_capable(sys.stdout, os.environ) and not os.environ.get("NO_COLOR")
    bold, end = ("\x1b[1m", "\x1b[0m") if coloured else ("", "")
    times = ", ".join(f"{kind} {time:.4g}" for kind, time in durations.items())
    times = f"a rank's layers take {times}" + (f", transfer {args.transfer:.4g}" if args.transfer else "")
    if args.kind == ALL:
        headings = ("schedule", "stages a rank", "step", "bubble", "peak in flight, by rank")
        cells = [(one.kind, one.stages, f"{one.timeline.duration:.4g}", one.bubble, one.peaks) for one in made]
        head, *lines = aligned(headings, cells, right=headings[1:4])
        size = f"{counted(args.ranks or 4, 'rank')}, {counted(args.microbatches or 8, 'microbatch', 'microbatches')}"
        left_out = [harmless(f"{kind}: {error.rule}") for kind, error in refused.items()]
        return [size, f"({times})", "", f"{bold}{head}{end}", *lines, *left_out]
    (one,) = made
    # Output into a file has no limit of width, unless COLUMNS is set.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else None
    return [
        f"{bold}{one.title}{end}",
        "",
        *rows(one.timeline, width=width, coloured=coloured),
        "",
        f"step            {one.timeline.duration:.4g} ({times})",
        f"bubble          {one.bubble} of all ranks' time",
        f"peak in flight  {one.peaks} microbatches, by rank",
    ]
