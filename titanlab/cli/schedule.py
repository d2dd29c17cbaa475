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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.sweep import aligned
from titanlab.system import Console, harmless, is_capable
from titanlab.techniques.schedule.action import Action, Kind, Timeline, simulate
from titanlab.techniques.schedule.contract import PipelineSchedule
from titanlab.techniques.schedule.csv_schema import write_actions
from titanlab.techniques.schedule.plot import draw, rows

ALL = "all"
# Most stages times microbatches; a larger timeline takes minutes.
LIMIT = 500_000
# The largest ratio of the longest to the shortest duration.
PROPORTION = 1000
TIMES = ("forward", "backward", "input", "weight", "transfer")
# Texts in errors about a recipe, and their replacements in errors of this command.
FLAGS = {
    "schedule.stages_per_rank": "--stages-per-rank",
    "schedule.file": "--file",
    "schedule=": "titanlab schedule ",
    "parallelism.pipeline=": "--ranks=",
}
# Recipes set microbatches by batch sizes, this command by a flag.
_BATCH_ADVICE = re.compile(r"training\.\w+ times \d+")
_MOST_LISTED = 8  # ranks whose peaks are all listed


@dataclass(frozen=True, kw_only=True)
class Made:
    """A schedule for some ranks and microbatches."""

    kind: str
    orders: list[list[Action]]
    timeline: Timeline
    microbatches: int

    @property
    def stages_per_rank(self) -> float:
        return len(self.timeline.placement) / len(self.orders)

    @property
    def title(self) -> str:
        return (
            f"{self.kind}: {_counted(len(self.orders), 'rank')}, {_counted(self.microbatches, 'microbatch', 'es')}, "
            f"{_counted(self.stages_per_rank, 'stage')} a rank"
        )


def schedule_verb(args: Namespace) -> int:
    _check_arguments(args)
    try:
        made, refused = _made(args)
    except ConfigError as error:
        # The flags of this command in place of a recipe's keys.
        cure = _BATCH_ADVICE.sub("other --microbatches", error.cure)
        for name, flag in FLAGS.items():
            cure = cure.replace(name, flag)
        raise ConfigError(FLAGS.get(error.key, error.key), error.value, error.rule, cure) from error
    if args.csv is not None:
        if not args.csv.absolute().parent.is_dir():
            raise ConfigError("--csv", args.csv, "there is no such folder", "make it, or name another")
        try:
            write_actions(args.csv, made[0].orders)
        except OSError as error:
            raise ConfigError("--csv", args.csv, f"cannot be written: {error.strerror}", "name another file") from error
    if args.plot is not None:
        draw([(f"{one.title} · bubble {_percent(one.timeline)}", one.timeline) for one in made], args.plot)
    lines = _table(made, refused, args) if args.kind == ALL else _picture(made[0], args)
    console = Console()
    console.note("\n".join(lines), coloured=True)
    for path, what in ((args.csv, "csv"), (args.plot, "plot")):
        if path is not None:
            console.note(f"{what}: {path}")
    return 0


def _check_arguments(args: Namespace) -> None:
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
    for name in TIMES:
        value = getattr(args, name)
        may_be_zero = name == "transfer"
        if value is not None and not (0 < value < math.inf or (may_be_zero and value == 0)):
            rule = "must be finite and " + ("not negative" if may_be_zero else "positive")
            raise ConfigError(f"--{name}", value, rule, "try 1")
    # A column is a fraction of the shortest duration, so unequal durations need too many columns.
    typed = {name: getattr(args, name) for name in TIMES if getattr(args, name) is not None}
    times = list(_durations(args).values())
    if max(*times, args.transfer or 0.0) > PROPORTION * min(times):
        # Name the typed duration that is furthest from 1.
        name = max(typed, key=lambda flag: abs(math.log(typed[flag] or 1.0)))
        rule = f"makes the longest duration more than {PROPORTION:,} times the shortest"
        raise ConfigError(f"--{name}", typed[name], rule, "try 1")
    if args.csv is not None and args.kind == ALL:
        raise ConfigError("--csv", args.csv, "holds one schedule", "name it instead of all: titanlab schedule 1f1b")
    if args.file is not None and (args.kind == ALL or "file" not in _fields(_schema(args.kind))):
        raise ConfigError("--file", args.file, "is for the schedule csv", "try titanlab schedule csv")


def _made(args: Namespace) -> tuple[list[Made], dict[str, ConfigError]]:
    """The schedule that the user named, or all schedules; and the errors of schedules that cannot be made."""
    if args.kind != ALL:
        return [_make(args.kind, args)], {}
    made, refused = [], {}
    for kind in discover()["schedule"]:
        # A schedule that is read from a file is not compared: the file is for one pipeline.
        if kind is None or "file" in _fields(_schema(kind)):
            continue
        try:
            made.append(_make(kind, args, chosen=False))
        except ConfigError as error:
            refused[kind] = error
    return sorted(made, key=lambda schedule: (schedule.timeline.duration, schedule.kind)), refused


def _make(kind: str, args: Namespace, *, chosen: bool = True) -> Made:
    """Make one schedule; if the user has named it (`chosen`), a flag that it does not use is a mistake."""
    schema = _schema(kind)
    fields, values = _fields(schema), {}
    if args.stages_per_rank is not None:
        if "stages_per_rank" in fields:
            values["stages_per_rank"] = args.stages_per_rank
            if not chosen:
                try:
                    schema(**values)
                except ConfigError:
                    # When all are compared, a schedule with a fixed number of stages keeps its number.
                    values = {}
        elif chosen and args.stages_per_rank != 1:
            rule = f"{kind} has one stage a rank" if "file" not in fields else "the file says which stages there are"
            cure = "leave it out, or try titanlab schedule interleaved_1f1b"
            raise ConfigError("--stages-per-rank", args.stages_per_rank, rule, cure)
    if "file" in fields:
        values["file"] = args.file or ""
    config: PipelineSchedule = schema(**values)
    usual = config.fixed_size() or (4, 8)
    ranks, microbatches = args.ranks or usual[0], args.microbatches or usual[1]
    config.check_pipeline(ranks=ranks, microbatches=microbatches)
    placement = config.placement(ranks=ranks)
    orders = config.actions(ranks=ranks, microbatches=microbatches)
    share = ranks / len(placement)  # of a rank's layers in one stage
    durations = {action: share * time for action, time in _durations(args).items()}
    timeline = simulate(orders, placement, durations, transfer=args.transfer or 0.0)
    return Made(kind=kind, orders=orders, timeline=timeline, microbatches=microbatches)


def _schema(kind: str) -> type[Any]:
    return discover()["schedule"][kind].schema


def _fields(schema: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(schema)}


def _durations(args: Namespace) -> Mapping[Kind, float]:
    backward = args.backward or 2.0
    return {
        Kind.FORWARD: args.forward or 1.0,
        Kind.BACKWARD: backward,
        Kind.INPUT: args.input or backward / 2,
        Kind.WEIGHT: args.weight or backward / 2,
    }


def _picture(made: Made, args: Namespace) -> list[str]:
    coloured = _is_coloured()
    # A file has no width, unless COLUMNS is set.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else None
    return [
        _strong(made.title, coloured=coloured),
        "",
        *rows(made.timeline, width=width, coloured=coloured),
        "",
        f"step            {_figure(made.timeline.duration)} ({_times(args)})",
        f"bubble          {_percent(made.timeline)} of all ranks' time",
        f"peak in flight  {_peaks(made.timeline)} microbatches, by rank",
    ]


def _table(made: list[Made], refused: Mapping[str, ConfigError], args: Namespace) -> list[str]:
    headings = ("schedule", "stages a rank", "step", "bubble", "peak in flight, by rank")
    body = [
        (
            schedule.kind,
            _figure(schedule.stages_per_rank),
            _figure(schedule.timeline.duration),
            _percent(schedule.timeline),
            _peaks(schedule.timeline),
        )
        for schedule in made
    ]
    lines = aligned(headings, body, right=headings[1:4])
    title = f"{_counted(args.ranks or 4, 'rank')}, {_counted(args.microbatches or 8, 'microbatch', 'es')}"
    left_out = [harmless(f"{kind}: {error.rule}") for kind, error in refused.items()]
    return [title, f"({_times(args)})", "", _strong(lines[0], coloured=_is_coloured()), *lines[1:], *left_out]


def _times(args: Namespace) -> str:
    times = ", ".join(f"{kind} {_figure(time)}" for kind, time in _durations(args).items())
    sent = f", transfer {_figure(args.transfer)}" if args.transfer else ""
    return f"a rank's layers take {times}{sent}"


def _peaks(timeline: Timeline) -> str:
    peaks = [_figure(peak) for peak in timeline.peak_in_flight]
    return " ".join(peaks) if len(peaks) <= _MOST_LISTED else f"{' '.join(peaks[: _MOST_LISTED - 2])} … {peaks[-1]}"


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _percent(timeline: Timeline) -> str:
    return f"{100 * timeline.bubble_share:.1f} %"


def _counted(number: float, word: str, plural: str = "s") -> str:
    return f"{_figure(number)} {word}{'' if number == 1 else plural}"


def _strong(text: str, *, coloured: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if coloured else text


def _is_coloured() -> bool:
    return is_capable(sys.stdout, os.environ) and not os.environ.get("NO_COLOR")
