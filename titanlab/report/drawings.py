"""The frames of `titanlab.report.analyses` as figures with matplotlib: `draw_scaling` draws a `scaling_frame`, …"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titanlab.plan import ITEMS
from titanlab.report.analyses import GRAD_NORM, ITEM, LOSS
from titanlab.report.figures import bars, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

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
    shown, splits = memory.head(style.MOST_BARS), []
    for row in shown.to_dict("records"):
        parts = {bars.ITEM_NAMES.get(name, name): row[f"{ITEM}{name}"] for name in ITEMS}
        parts["rest"] = row["estimated_gib"] - sum(parts.values())
        splits.append(bars.StackedBar(row["run"], row["name"], parts, columns=["config.yaml"], is_measured=False))
    return bars.memory_items(splits, count=len(memory), measured=shown["measured_gib"])


def draw_bubbles(schedules: DataFrame) -> Figure:
    """Idle time against the number of microbatches, one line for each schedule; all for the same number of ranks."""
    ranks = ", ".join(map(str, sorted(set(schedules["ranks"]))))
    figure, axis = style.new_figure(4.2, f"bubble of a pipeline of {ranks} ranks" if ranks else "bubble of a pipeline")
    names = list(dict.fromkeys(schedules["schedule"]))
    for place, name in enumerate(names):
        rows = schedules[schedules["schedule"] == name].sort_values("microbatches")
        look = {**style.line_look(place, len(names)), "marker": "o", "markersize": 4}
        axis.plot(rows["microbatches"], rows["bubble_percent"], label=style.legend_text(name), **look)
    style.add_line_legend(figure, axis, len(names), "no schedule allows these ranks and microbatches")
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
        # Without a positive value no line is drawn, so choose limits around the tolerance.
        if not (differences[column] > 0).any():
            axis.set_ylim(tolerance / 10, tolerance * 10)
        axis.axhline(tolerance, color=style.MUTED, linewidth=1, linestyle=(0, (3, 2)))
        axis.text(1.0, tolerance, f" tolerance {tolerance:g}", transform=axis.get_yaxis_transform(), fontsize=8.5)
    style.add_line_legend(figure, axis, len(runs), "no other run has logged the same steps")
    axis.set_xlabel("step")
    axis.set_ylabel("relative difference")
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    return figure
