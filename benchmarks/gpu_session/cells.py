"""Cells and lines of the tables of Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "–"


def head(names: Sequence[str]) -> list[str]:
    return [line(*names), line(*["---"] * len(names))]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def plain(text: object) -> str:
    """Text of others for a cell: one line, without what ends a cell."""
    return " ".join(str(text).replace("|", "/").replace("`", "'").split())[:400]


def number(value: float | None, form: str, unit: float = 1.0) -> str:
    return NONE if value is None else form.format(value / unit)


def ratio(value: float | None, other: float | None) -> str:
    return NONE if value is None or not other else f"{value / other:.2f}"


def spread(figures: Mapping[str, Any]) -> str:
    """The median of the steps, and their quartiles."""
    seconds = [each for each in figures.get("step_seconds_all") or [] if each is not None]
    if len(seconds) < 2 or figures.get("step_seconds") is None:
        return number(figures.get("step_seconds"), "{:.4g}")
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{figures['step_seconds']:.4g} ({low:.4g} to {high:.4g})"
