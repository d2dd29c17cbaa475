"""A bar for each recipe: throughput, memory, outcomes of its runs, and the parts of its step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titanlab.records import OutcomeKind
from titanlab.report.figures import style
from titanlab.sweep import RecipeRuns, groups, state_tone, state_word
from titanlab.system import counted, grouped, short_span, significant

if TYPE_CHECKING:
    from pandas import DataFrame

    from titanlab.report.figures.traced import TracedFigure


# The axis is _ROOM times as long as the longest bar or interval, so that the texts fit; an interval is cut at
# _MOST_BAND times the longest bar.
_ROOM, _MOST_BAND = 1.5, 1.6


def throughput_by_layout(
    runs: DataFrame | Sequence[Mapping[str, Any]],
    *,
    together: bool = False,
    ranked: bool = False,
    bands: Mapping[str, tuple[float, float]] | None = None,
) -> TracedFigure:
    """Tokens per second of each recipe: a bar is the geometric mean over repeats, a point is one run.

    Args:
        together: show the speed of all devices together instead of one device.
        ranked: put the fastest recipe on top instead of the sweep's first one; oversubscribed recipes come last.
        bands: an interval for each recipe, by its label, drawn as a line with ends.
    """
    column, of = ("tokens_per_second_all", "all devices") if together else ("tokens_per_second", "one device")
    compared = groups(style.records_of(runs))
    if ranked:
        compared = sorted(
            compared,
            key=lambda group: (not group.has_speed, -(group.typical(column) or -1.0)),
        )

    def text(group: RecipeRuns, value: float) -> str:
        words, mfu, whole = grouped(value), group.typical("mfu_percent"), group.typical("tokens_per_second_all")
        if not together and group.world != 1 and whole is not None:
            words += f", {grouped(whole)} together"
        return words if together or mfu is None else f"{words}  (MFU {mfu:.1f}%)"

    label = f"tokens per second of {of}, median step after warm-up"
    return _bars(compared, column, "throughput by layout", label, text, bands=bands or {})


def stack_steps(
    steps: Sequence[RecipeRuns], gains: Mapping[str, str], bands: Mapping[str, tuple[float, float]]
) -> TracedFigure:
    """Tokens per second of the steps of a stack, in their order.

    Args:
        gains: the text of a step's gain, by the label of its recipe.
        bands: an interval for each recipe, by its label.
    """

    def text(group: RecipeRuns, value: float) -> str:
        return f"{grouped(value)}  {gains.get(group.label, '')}".rstrip()

    return _bars(
        steps, "tokens_per_second", "what each step adds", "tokens per second of one device", text, bands=bands
    )


def memory_by_layout(runs: DataFrame | Sequence[Mapping[str, Any]]) -> TracedFigure:
    """Peak memory of each recipe: a bar is the median over repeats, a point is one run."""
    compared = groups(style.records_of(runs))
    on_gpu = {row["accelerator"] for group in compared for row in group.rows} == {"cuda"}
    kind = "reserved by the allocator" if on_gpu else "resident memory of the process on a CPU"
    label = f"GiB at the peak, of the rank that logs: {kind}"
    # Oversubscribed cores change the speed, not the memory of a process.
    return _bars(compared, "memory_gib", "memory by layout", label, lambda _, value: f"{value:.2f}", hatched=False)


def _bars(
    compared: Sequence[RecipeRuns],
    column: str,
    title: str,
    label: str,
    text: Callable[[RecipeRuns, float], str],
    *,
    hatched: bool = True,
    bands: Mapping[str, tuple[float, float]] | None = None,
) -> TracedFigure:
    """A horizontal bar for each recipe; a recipe without a value shows its outcomes as text."""
    shown = compared[: style.MOST_BARS]
    figure, axis = style.new_bars(len(shown), title)
    longest = max((value for group in shown for value in group.values(column)), default=1.0) or 1.0
    # An interval from two runs can be many times as long as a bar: cut all intervals here.
    furthest = min(max([longest, *(high for _, high in (bands or {}).values())]), _MOST_BAND * longest)
    colours = style.recipe_colours([row for group in compared for row in group.rows])
    for place, group in enumerate(shown):
        value = group.typical(column)
        names = [row["run"] for row in group.rows]
        if value is None:
            ends = ", ".join(sorted({state_word(row) for row in group.rows}))
            note = axis.text(0.01 * longest, place, ends, va="center", fontsize=8.5, style="italic", color=style.MUTED)
            figure.trace(note, runs=names, columns=["outcome", "state"], text=f"{group.label}: {ends}")
            continue
        colour = colours.get(names[0], style.BLUE)
        is_hatched = hatched and group.is_oversubscribed
        look = {**style.OVERSUBSCRIBED, "edgecolor": colour} if is_hatched else {"facecolor": colour}
        (bar,) = axis.barh(place, value, height=0.72, linewidth=0.8, **look)
        measured = [row for row in group.rows if row["outcome"] == "done" and row[column] is not None]
        description = f"{group.label}: {text(group, value)}, {counted(len(measured), 'run')}"
        figure.trace(bar, runs=[row["run"] for row in measured], columns=[column], text=description)
        band = bands.get(group.label) if bands and not group.is_control else None
        if band is not None:
            # A line with ends for the interval of the mean; an arrow if the interval continues beyond the figure.
            low, high, is_cut = band[0], min(band[1], furthest), band[1] > furthest
            axis.plot([low, high], [place, place], color=style.INK, linewidth=1.2, solid_capstyle="butt")
            for end, mark in ((low, "|"), (high, ">" if is_cut else "|")):
                size = 6 if mark == ">" else 9
                axis.plot(end, place, mark, color=style.INK, markersize=size, markeredgewidth=1.2)
        for row in measured if len(measured) > 1 else []:
            (point,) = axis.plot(row[column], place, "o", ms=4, color=style.WHITE, mec=style.INK, mew=0.6)
            description = f"{row['run']}: {significant(row[column], 4)}"
            figure.trace(point, runs=[row["run"]], columns=[column], text=description)
        furthest_mark = min(furthest, max(value, *(band or ()), *(row[column] for row in measured)))
        words: dict[str, Any] = {"va": "center", "fontsize": 8.5, "color": style.INK}
        axis.text(furthest_mark + 0.02 * furthest, place, text(group, value), **words)
    axis.set_xlim(0, furthest * _ROOM)
    labels = [
        group.label + (" (control)" if group.is_control else "") + (" (emulated)" if group.is_emulated else "")
        for group in shown
    ]
    style.label_bars(axis, labels, len(compared))
    axis.set_xlabel(label)
    axis.xaxis.set_major_formatter(lambda value, _: grouped(value) if longest >= 10 else significant(value, 2))
    if hatched and any(group.is_oversubscribed for group in shown):
        style.explain_hatches(figure)
    return figure


_TONES = {"good": style.GREEN, "busy": style.SKY, "idle": style.GREY, "halted": style.YELLOW, "bad": style.RED}
# Hatches make outcomes differ in black and white too; all bad outcomes have the same colour.
_HATCHES = {"crash": "xx", "oom": "//", "hang": "\\\\", "nan": ".."}
_HATCHES |= {"data": "++", "node_fail": "oo", "infeasible": "--"}


def outcomes(runs: DataFrame | Sequence[Mapping[str, Any]]) -> TracedFigure:
    """The outcomes or current states of each recipe's runs; dropped points have separate bars."""
    from matplotlib.ticker import MaxNLocator

    rows = style.records_of(runs)
    counts = [(group.label, Counter(map(state_word, group.rows))) for group in groups(rows)]
    unknown = [row for row in rows if row["layout.label"] is None and row["state"] != "dropped"]
    counts += [("(no folder)", Counter(map(state_word, unknown)))] if unknown else []
    stages = Counter(row["dropped_stage"] for row in rows if row["state"] == "dropped")
    counts += [(f"(dropped: {stage})", Counter({"dropped": count})) for stage, count in stages.items()]
    colours = {state_word(row): _TONES[state_tone(row)] for row in rows}
    kinds = [kind.value for kind in OutcomeKind]
    shown = counts[: style.MOST_BARS]
    figure, axis = style.new_bars(len(shown), "outcomes")
    starts = [0] * len(shown)
    for name in (*kinds, *sorted({*colours} - {*kinds, "dropped"}), "dropped"):
        lengths = [by_word[name] for _, by_word in shown]
        if any(lengths):
            look: dict[str, Any] = {"color": colours.get(name, style.GREY), "hatch": _HATCHES.get(name)}
            label = f"{name} ({sum(by_word[name] for _, by_word in counts)})"
            axis.barh(range(len(shown)), lengths, 0.72, starts, edgecolor=style.WHITE, label=label, **look)
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    style.label_bars(axis, [label for label, _ in shown], len(counts))
    axis.set_xlabel("runs, or points")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if shown:
        style.add_legend(figure, "right upper")
    return figure


# Colour and hatch of each part: communication is orange and red, with a hatch for each axis.
_LOOKS: Mapping[str, tuple[str, str | None]] = {
    "compute": (style.BLUE, None),
    "forward": (style.BLUE, None),
    "backward": (style.SKY, None),
    "replicate": (style.ORANGE, None),
    "shard": (style.ORANGE, "//"),
    "tensor": (style.RED, None),
    "context": (style.RED, "\\\\"),
    "pipeline": (style.RED, ".."),
    "expert": (style.RED, "++"),
    "bubble": (style.GREY, "xx"),
    "optimizer": (style.PURPLE, None),
    "data": (style.YELLOW, None),
    "checkpoint": (style.YELLOW, "//"),
    "stragglers": (style.GREY, "//"),
    "other": (style.GREY, None),
}
COMMUNICATION = ("replicate", "shard", "tensor", "context", "pipeline", "expert")


# Colour and hatch of each item of memory; `rest` is what the peak has beyond the other items.
_MEMORY_LOOKS: Mapping[str, tuple[str, str | None]] = {
    "parameters": (style.BLUE, None),
    "gradients": (style.SKY, None),
    "optimizer state": (style.GREEN, None),
    "activations": (style.ORANGE, None),
    "backward of a block": (style.ORANGE, "//"),
    "gathered parameters": (style.BLUE, "//"),
    "unreduced gradients": (style.SKY, "//"),
    "logits and loss": (style.PURPLE, None),
    "communication buffers": (style.RED, None),
    "rest": (style.GREY, None),
}
MEMORY_ITEMS = tuple(_MEMORY_LOOKS)
# Items of the planner that have another name in figures.
ITEM_NAMES = {"optimizer": "optimizer state"}


@dataclass(frozen=True)
class StackedBar:
    """One bar, and the parts of it: the seconds of a run's step, or the GiB of its memory.

    Attributes:
        parts: size by name; in a step, the name of an axis means its exposed communication.
        is_measured: False: an estimate of the planner.
    """

    run: str
    label: str
    parts: Mapping[str, float]
    columns: Sequence[str]
    is_measured: bool = field(kw_only=True)


def step_time_split(splits: Sequence[StackedBar]) -> TracedFigure:
    """Stacked bars of a step's seconds, one bar for each recipe; estimates are labelled as such."""
    return _stacked(splits, "time of a step", "seconds of a step", _LOOKS, part_name, short_span)


def memory_items(
    splits: Sequence[StackedBar], *, count: int | None = None, measured: Sequence[float] | None = None
) -> TracedFigure:
    """Stacked bars of the items of memory in GiB, one bar for each recipe; estimates are labelled as such.

    Args:
        count: number of all bars, also bars that are not shown.
        measured: the measured GiB of each bar, drawn as a diamond.
    """
    label = "GiB at the peak, of the rank that needs most"
    looks, text = _MEMORY_LOOKS, lambda size: f"{significant(size, 3)} GiB"
    return _stacked(splits, "memory by item", label, looks, str, text, count=count, marks=measured)


def _stacked(
    splits: Sequence[StackedBar],
    title: str,
    label: str,
    looks: Mapping[str, tuple[str, str | None]],
    name_of: Callable[[str], str],
    text_of: Callable[[float], str],
    *,
    count: int | None = None,
    marks: Sequence[float] | None = None,
) -> TracedFigure:
    is_measured = any(split.is_measured for split in splits)
    heading = title if is_measured else f"{title}, estimated"
    figure, axis = style.new_bars(len(splits), heading, above=style.FRAME + 0.3)
    order = [name for name in looks if any(split.parts.get(name) for split in splits)]
    order += sorted({name for split in splits for name, value in split.parts.items() if value} - {*looks})
    longest = max((sum(split.parts.values()) for split in splits), default=0.0) or 1.0
    labelled = set[str]()
    for place, split in enumerate(splits):
        left = 0.0
        for name in order:
            value = split.parts.get(name) or 0.0
            if value <= 0:
                continue
            colour, hatch = looks.get(name, (style.GREY, "oo"))
            text = name_of(name)
            look: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": style.WHITE, "linewidth": 0.6}
            in_legend = None if name in labelled else text
            (bar,) = axis.barh(place, value, left=left, height=0.72, label=in_legend, **look)
            labelled.add(name)
            description = f"{split.label}: {text} {text_of(value)}{'' if split.is_measured else ', estimated'}"
            figure.trace(bar, runs=[split.run], columns=split.columns, text=description)
            left += value
        if marks is None:
            text = text_of(left) + ("" if split.is_measured else " (estimate)")
            axis.text(left + 0.012 * longest, place, text, va="center", fontsize=8.5, color=style.INK)
    if marks is None:
        axis.set_xlim(0, longest * 1.25)
    else:
        axis.plot(marks, range(len(splits)), "D", color=style.INK, markersize=5.5, label="measured" if splits else None)
    style.label_bars(axis, [split.label for split in splits], len(splits) if count is None else count)
    axis.set_xlabel(label)
    if splits:
        style.add_legend(figure, "lower left", ncols=4)
    return figure


def part_name(name: str) -> str:
    """The name of a part in words; the name of an axis means its exposed communication."""
    if name == "bubble":
        # Not the same as a timeline's bubble, which is the idle share of all ranks.
        return "bubble of the busiest rank"
    return f"exposed: {name}" if name in COMMUNICATION else name
