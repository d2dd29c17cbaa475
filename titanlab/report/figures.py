"""Figures of a sweep with matplotlib; each function returns one figure, without a window.

The colours of Okabe and Ito (Color Universal Design, 2008) suit all kinds of colour vision; a hatch, a line style or a
width also shows each difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from titanlab.costs import meter
from titanlab.records.outcome import OutcomeKind
from titanlab.sweep.table.comparison import Group, groups
from titanlab.sweep.table.listing import tone, word
from titanlab.terminal.numerals import grouped, short, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_BLUE, _ORANGE, _GREEN, _YELLOW = "#0072b2", "#e69f00", "#009e73", "#f0e442"
_SKY, _RED, _PURPLE, _GREY = "#56b4e9", "#d55e00", "#cc79a7", "#999999"
_LINES = (_BLUE, _RED, _GREEN, _PURPLE, _ORANGE, _SKY, "#000000")
_STYLES = ("solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
_TONES = {"good": _GREEN, "busy": _SKY, "idle": _GREY, "halted": _YELLOW, "bad": _RED}
# Outcomes also differ in black and white, and bad outcomes, which share a colour, differ from each other.
_HATCHES = {
    "crash": "xx",
    "oom": "//",
    "hang": "\\\\",
    "nan": "..",
    "data": "++",
    "node_fail": "oo",
    "infeasible": "--",
}
_OVERSUBSCRIBED: dict[str, Any] = {"facecolor": "#d9e6ef", "hatch": "////", "edgecolor": _BLUE}
_INK = "#333333"
_WIDTH, _BAR, _FRAME = 8.0, 0.36, 1.3  # inches: width of a figure, height of one bar, height around all bars
_MOST_BARS = 60
_MOST_LINES = 14


def throughput_by_layout(runs: DataFrame, *, together: bool = False) -> Figure:
    """Tokens per second of each recipe: bars are medians over repeats, points the runs.

    Args:
        runs: the frame of `sweep_frame`.
        together: show the speed of all devices together instead of one device.
    """
    column, of = ("tokens_per_second_all", "all devices") if together else ("tokens_per_second", "one device")
    compared = groups(_rows(runs))

    def text(group: Group, value: float) -> str:
        mfu = group.median("mfu_percent")
        return grouped(value) + ("" if mfu is None or together else f"  (MFU {mfu:.1f}%)")

    return _bars(compared, column, "throughput", f"tokens per second of {of}, median step after warm-up", text)


def memory_by_layout(runs: DataFrame) -> Figure:
    """Peak memory of each recipe: bars are medians over repeats, points the runs.

    Args:
        runs: the frame of `sweep_frame`.
    """
    compared = groups(_rows(runs))
    on_gpu = {row["accelerator"] for group in compared for row in group.rows} == {"cuda"}
    kind = "reserved by the allocator" if on_gpu else "resident memory of the process on a CPU"
    label = f"GiB at the peak, of the rank that logs: {kind}"
    # Oversubscribed cores change the speed, not the memory of a process.
    return _bars(compared, "memory_gib", "memory", label, lambda _, value: f"{value:.2f}", hatched=False)


def loss_by_tokens(steps: DataFrame) -> Figure:
    """Training loss against tokens, one line for each run; lines that cover each other have different widths.

    Args:
        steps: the frame of `metrics_frame`.
    """
    figure, axis = _figure(_WIDTH, 4.6)
    names = list(dict.fromkeys(steps["run"]))
    labels = dict(zip(steps["run"], steps["name"] + " (" + steps["layout.label"] + ")", strict=True)) if names else {}
    for place, name in enumerate(names):
        rows = steps[steps["run"] == name].dropna(subset=[meter.LOSS]).sort_values("step")
        axis.plot(
            rows[meter.TOKENS_SEEN],
            rows[meter.LOSS],
            color=_LINES[place % len(_LINES)],
            linestyle=_STYLES[place // len(_LINES) % len(_STYLES)],
            # The same training under two layouts gives the same curve: the wider line stays visible on both sides.
            linewidth=1.4 + max(0, min(len(names), _MOST_LINES) - 1 - place) * 0.6,
            solid_capstyle="butt",
            dash_capstyle="butt",
            label=labels[name] if place < _MOST_LINES else None,
        )
    axis.set_xlabel("tokens trained on")
    axis.set_ylabel("loss (nats per token)")
    axis.xaxis.set_major_formatter(lambda value, _: short(value, digits=2))
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    if names:
        more = f"… and {len(names) - _MOST_LINES} more" if len(names) > _MOST_LINES else None
        figure.legend(loc="outside right upper", fontsize=8.5, frameon=False, title=more, title_fontsize=8.5)
    else:
        _show_text(axis, "no step has been logged")
    _set_title(axis, "loss against tokens")
    return figure


def outcomes(runs: DataFrame) -> Figure:
    """The outcomes or current states of each recipe's runs; dropped points have bars of their own.

    Args:
        runs: the frame of `sweep_frame`.
    """
    from matplotlib.ticker import MaxNLocator

    rows = _rows(runs)
    counts = [(group.label, Counter(map(word, group.rows))) for group in groups(rows)]
    unknown = [row for row in rows if row["layout.label"] is None and row["state"] != "dropped"]
    counts += [("(no folder)", Counter(map(word, unknown)))] if unknown else []
    stages = Counter(row["dropped_stage"] for row in rows if row["state"] == "dropped")
    counts += [(f"(dropped: {stage})", Counter({"dropped": count})) for stage, count in stages.items()]
    colours = {word(row): _TONES[tone(row)] for row in rows}
    kinds = [kind.value for kind in OutcomeKind]
    order = [*kinds, *sorted({*colours} - {*kinds, "dropped"}), "dropped"]
    shown = counts[:_MOST_BARS]
    figure, axis = _figure(_WIDTH, _FRAME + _BAR * max(1, len(shown)))
    for name in order:
        starts = [sum(by_word[earlier] for earlier in order[: order.index(name)]) for _, by_word in shown]
        lengths = [by_word[name] for _, by_word in shown]
        if any(lengths):
            axis.barh(
                range(len(shown)),
                lengths,
                left=starts,
                height=0.72,
                color=colours.get(name, _GREY),
                edgecolor="white",
                hatch=_HATCHES.get(name),
                label=f"{name} ({sum(by_word[name] for _, by_word in counts)})",
            )
    _label_bars(axis, [label for label, _ in shown], len(counts))
    axis.set_xlabel("runs, or points")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if shown:
        figure.legend(loc="outside right upper", fontsize=8.5, frameon=False)
    _set_title(axis, "outcomes")
    return figure


def _bars(
    compared: Sequence[Group],
    column: str,
    title: str,
    label: str,
    text: Callable[[Group, float], str],
    *,
    hatched: bool = True,
) -> Figure:
    """A horizontal bar for each recipe; a recipe without a value shows its outcomes as text."""
    shown = compared[:_MOST_BARS]
    oversubscribed = [hatched and group.is_oversubscribed for group in shown]
    figure, axis = _figure(_WIDTH, _FRAME + _BAR * max(1, len(shown)))
    medians = [group.median(column) for group in shown]
    longest = max((value for value in medians if value is not None), default=1.0)
    for place, (group, value) in enumerate(zip(shown, medians, strict=True)):
        if value is None:
            ends = ", ".join(sorted({word(row) for row in group.rows}))
            axis.text(0.01 * longest, place, ends, va="center", fontsize=8.5, style="italic", color="#666666")
            continue
        look: dict[str, Any] = _OVERSUBSCRIBED if oversubscribed[place] else {"facecolor": _BLUE}
        axis.barh(place, value, height=0.72, linewidth=0.8, **look)
        points = group.values(column)
        if len(points) > 1:
            axis.plot(points, [place] * len(points), "o", markersize=4, color=_ORANGE, markeredgecolor=_INK, mew=0.6)
        end = max([value, *points])
        axis.text(end + 0.015 * longest, place, text(group, value), va="center", fontsize=8.5, color=_INK)
    axis.set_xlim(0, longest * 1.28)
    _label_bars(axis, [group.label for group in shown], len(compared))
    axis.set_xlabel(label)
    axis.xaxis.set_major_formatter(lambda value, _: grouped(value) if longest >= 10 else significant(value, 2))
    if any(oversubscribed):
        from matplotlib.patches import Patch

        legend = "oversubscribed: more processes than cores, so that the speed says nothing"
        handles = [Patch(label=legend, **_OVERSUBSCRIBED)]
        figure.legend(handles=handles, loc="outside lower left", fontsize=8.5, frameon=False)
    _set_title(axis, f"{title} by layout")
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(width, height), layout="constrained", dpi=110)
    axis = figure.subplots()
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(labelsize=8.5, colors=_INK)
    return figure, axis


def _label_bars(axis: Axes, labels: Sequence[str], count: int) -> None:
    """Write the labels of the bars, with the first bar on top."""
    axis.set_yticks(range(len(labels)), list(labels))
    axis.set_ylim(max(1, len(labels)) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    if count > len(labels):
        axis.set_ylabel(f"the first {len(labels)} of {count}", fontsize=8.5)
    if not labels:
        axis.set_yticks([])
        _show_text(axis, "no run")


def _show_text(axis: Axes, text: str) -> None:
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color="#666666")


def _set_title(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11)
    axis.xaxis.label.set_fontsize(9)
    axis.yaxis.label.set_fontsize(9)


def _rows(frame: DataFrame) -> list[dict[Any, Any]]:
    """A frame's rows, with None for missing values."""
    plain = frame.astype(object)
    records: list[dict[Any, Any]] = plain.where(plain.notna(), None).to_dict("records")
    return records
