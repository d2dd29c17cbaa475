"""The frames of `titanlab.report.analyses` as figures with matplotlib: `draw_scaling` draws a `scaling_frame`, …"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titanlab.plan import ITEMS
from titanlab.report.analyses import GRAD_NORM, ITEM, LOSS
from titanlab.report.figures import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

# Items of memory, in the order of ITEMS: colour, and a hatch if a colour occurs twice.
_LOOKS = ("#0072b2", "#56b4e9", "#009e73", "#0072b2", "#56b4e9", "#e69f00", "#e69f00", "#cc79a7", "#999999")
_HATCHES = (None, None, None, "///", "///", None, "///", None, None)
_QUANTITIES = {LOSS: "loss", GRAD_NORM: "gradient norm"}


def draw_scaling(scaling: DataFrame) -> Figure:
    """Efficiency of each recipe: tokens per second of one device, in percent of the reference's."""
    shown = scaling.head(style.MOST_BARS)
    figure, axis = style.new_bars(len(shown), "scaling efficiency by layout", above=1.5)
    longest = max([100.0, *shown["efficiency_percent"]])
    for place, row in enumerate(shown.to_dict("records")):
        look: Mapping[str, Any] = style.OVERSUBSCRIBED if row["oversubscribed"] else {"facecolor": style.BLUE}
        axis.barh(place, row["efficiency_percent"], height=0.72, linewidth=0.8, **look)
        than = style.label_text(row["reference"])
        times = f"{row['efficiency_percent']:.0f}%  ({row['speedup']:.2f} times as fast as {than})"
        text = "the reference" if row["reference"] == row["recipe"] else times
        end = row["efficiency_percent"] + 0.015 * longest
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axis.text(end, place, text, va="center", fontsize=8.5, color=style.INK, bbox=box)
    axis.axvline(100, color=style.MUTED, linewidth=0.9, linestyle=(0, (3, 2)), zorder=0)
    axis.set_xlim(0, longest * 1.55)
    labels = [f"{row['world']} × {row['recipe']}" for row in shown.to_dict("records")]
    style.label_bars(axis, labels, len(scaling))
    axis.set_xlabel("scaling efficiency: % of the tokens per second of one device of the reference")
    if shown["oversubscribed"].any():
        style.explain_hatches(figure)
    return figure


def draw_memory(memory: DataFrame) -> Figure:
    """The planner's items of memory as stacked bars, and the measurement as a mark."""
    shown = memory.head(style.MOST_BARS)
    title = "memory: the planner's items, and the measurement"
    figure, axis = style.new_bars(len(shown), title, above=1.7, bar=0.42)
    used = [name for name in ITEMS if len(shown) and shown[f"{ITEM}{name}"].sum() > 0]
    left = [0.0] * len(shown)
    for name in used:
        place = ITEMS.index(name)
        widths = list(shown[f"{ITEM}{name}"])
        look: dict[str, Any] = {"color": _LOOKS[place], "hatch": _HATCHES[place], "edgecolor": "white"}
        axis.barh(range(len(shown)), widths, left=left, height=0.66, linewidth=0.5, label=name, **look)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    if len(shown):
        rest = [estimate - tensors for estimate, tensors in zip(shown["estimated_gib"], left, strict=True)]
        word = "beside tensors: allocator, and on a CPU the process"
        axis.barh(
            range(len(shown)), rest, left=left, height=0.66, color="#f1f1ef", edgecolor=style.MUTED, lw=0.5, label=word
        )
        axis.plot(shown["measured_gib"], range(len(shown)), "D", color=style.INK, markersize=5.5, label="measured")
        style.add_legend(figure, "lower left", ncols=3)
    style.label_bars(axis, list(shown["name"]), len(memory))
    axis.set_xlabel("GiB at the peak, of the rank that needs most")
    return figure


def draw_bubbles(schedules: DataFrame) -> Figure:
    """Idle time against the number of microbatches, one line for each schedule; of one number of ranks."""
    ranks = ", ".join(map(str, sorted(set(schedules["ranks"]))))
    figure, axis = style.new_figure(4.2, f"bubble of a pipeline of {ranks} ranks" if ranks else "bubble of a pipeline")
    names = list(dict.fromkeys(schedules["schedule"]))
    for place, name in enumerate(names):
        rows = schedules[schedules["schedule"] == name].sort_values("microbatches")
        look = {**style.line_look(place, len(names)), "marker": "o", "markersize": 4}
        axis.plot(rows["microbatches"], rows["bubble_percent"], label=style.legend_text(name), **look)
    if names:
        style.add_legend(figure, "right upper")
    else:
        style.show_text(axis, "no schedule allows these ranks and microbatches")
    axis.set_xlabel("microbatches of a step")
    axis.set_ylabel("bubble: idle % of all ranks' time")
    axis.set_ylim(bottom=0)
    axis.grid(color="#e5e5e5", linewidth=0.8)
    return figure


def draw_differences(differences: DataFrame, *, column: str = LOSS, tolerance: float | None = None) -> Figure:
    """Relative differences from the reference by step, on a logarithmic axis; equal values are not drawn.

    Args:
        column: `loss_difference` or `grad_norm_difference`.
        tolerance: drawn as a dashed line.
    """
    figure, axis = style.new_figure(4.2, f"difference of the {_QUANTITIES[column]} from the reference")
    runs = list(dict.fromkeys(differences["run"]))
    for place, run in enumerate(runs[: style.MOST_LINES]):
        rows = differences[(differences["run"] == run) & (differences[column] > 0)].sort_values("step")
        name, layout = (differences.loc[differences["run"] == run, key].iloc[0] for key in ("name", "layout.label"))
        look = {**style.line_look(place, len(runs)), "marker": "o", "markersize": 3}
        axis.plot(rows["step"], rows[column], label=style.legend_text(f"{name} ({layout})"), **look)
    axis.set_yscale("log")
    if tolerance:
        # Without a positive value there is nothing to draw: a logarithmic axis has no 0.
        drawn = (differences[column] > 0).any()
        if not drawn:
            axis.set_ylim(tolerance / 10, tolerance * 10)
        axis.axhline(tolerance, color=style.MUTED, linewidth=1, linestyle=(0, (3, 2)))
        axis.text(1.0, tolerance, f" tolerance {tolerance:g}", transform=axis.get_yaxis_transform(), fontsize=8.5)
    if runs:
        more = f"… and {len(runs) - style.MOST_LINES} more" if len(runs) > style.MOST_LINES else None
        style.add_legend(figure, "right upper", title=more, title_fontsize=8.5)
    else:
        style.show_text(axis, "no other run has logged the same steps")
    axis.set_xlabel("step")
    axis.set_ylabel("relative difference")
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    return figure
