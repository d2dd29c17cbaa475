"""Groups a sweep's runs by recipe, and shows typical figures of each group."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlab.sweep.columns import POINT, point_keys
from titanlab.sweep.listing import OVERSUBSCRIBED, Row, aligned, runs, state_word
from titanlab.system import grouped

# Together with the layout, these columns define a recipe; a column is shown if it differs within the sweep.
_RECIPE = (
    *("model", "layers", "dim", "seq_len", "global_batch", "precision", "ac", "compile"),
    *("optimizer", "data", "accelerator", "device"),
)
# These follow from the layout, unless the user has set them.
_FOLLOWING = ("microbatch", "schedule")
_LAYOUT = ("layout.label", "world")
# Speeds are compared as ratios, also in a ranking.
SPEEDS = ("tokens_per_second", "tokens_per_second_all", "mfu_percent")
_FIGURES = ("processes", "tokens/s", "of all", "MFU", "GiB", "loss", "validation")


@dataclass(frozen=True)
class RecipeRuns:
    """Runs of one recipe.

    Attributes:
        differing: other columns in which the groups of the sweep differ; empty values are None.
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

    def values(self, column: str) -> list[float]:
        """The values of a column for the runs that are done and have one."""
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
    # Include the swept keys: some, such as a learning rate, have no column of their own.
    others = (*_FOLLOWING, *point_keys(shown))
    names = ("control", *_LAYOUT, *_RECIPE, *others)
    for row in shown:
        key = (bool(row["control"]), *(row[name] for name in names[1:]))
        members_of.setdefault(key, []).append(row)
    keys = [dict(zip(names, values, strict=True)) for values in members_of]
    differing = [name for name in _RECIPE if len({key[name] for key in keys}) > 1]
    differing += _needed(others, keys, (*_LAYOUT, *differing))
    return [
        RecipeRuns(key["layout.label"], key["world"], {name: key[name] for name in differing}, members)
        for key, members in zip(keys, members_of.values(), strict=True)
    ]


def comparison(rows: Iterable[Row]) -> list[str]:
    """Aligned lines: typical figures of the runs that are done, and the outcomes of all. Empty without a run."""
    compared = groups(rows)
    if not compared:
        return []
    headings = ["layout", "processes", *map(_short, compared[0].differing)]
    headings += ["tokens/s", "of all", "MFU", "GiB", "loss", "validation", "outcome"]
    lines = [
        [
            group.layout + (" (control)" if group.is_control else ""),
            str(group.world),
            *map(_shown, group.differing.values()),
            *_figures(group),
        ]
        for group in compared
    ]
    text = aligned(headings, lines, right=_FIGURES)
    return [*text, OVERSUBSCRIBED] if any(group.is_oversubscribed for group in compared) else text


def _needed(names: Sequence[str], keys: Sequence[Row], seen: Sequence[str]) -> list[str]:
    """The columns without which two lines would look the same."""
    needed: list[str] = []
    for name in names:
        distinct = {tuple(key[column] for column in (*seen, *needed)) for key in keys}
        if len(distinct) < len({tuple(key[column] for column in (*seen, *needed, name)) for key in keys}):
            needed.append(name)
    return needed


def _figures(group: RecipeRuns) -> list[str]:
    mark = "*" if group.is_oversubscribed else ""
    forms: dict[str, Callable[[float], str]] = {
        "tokens_per_second": lambda value: grouped(value) + mark,
        "tokens_per_second_all": lambda value: grouped(value) + mark,
        "mfu_percent": lambda value: f"{value:.1f}%",
        "memory_gib": lambda value: f"{value:.2f}",
        "loss": lambda value: f"{value:.4f}",
        "validation_loss": lambda value: f"{value:.4f}",
    }
    figures = {name: group.typical(name) for name in forms}
    texts = ["" if (figure := figures[name]) is None else form(figure) for name, form in forms.items()]
    ends = Counter(map(state_word, group.rows))
    alone = len(group.rows) == 1
    return [*texts, ", ".join(name if alone else f"{count} {name}" for name, count in ends.items())]


def _short(name: str) -> str:
    return name.removeprefix(POINT)


def _shown(value: object) -> str:
    if value is None:
        return ""
    return grouped(value) if isinstance(value, int) and not isinstance(value, bool) else str(value)
