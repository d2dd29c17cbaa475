"""The planner's estimate of a run, to be held against what was measured.

A sweep's estimates are made when it is submitted, and kept in points.jsonl: to read a recipe back from a run's folder
takes forty times as long as to estimate it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titanlab.errors import TitanlabError

if TYPE_CHECKING:
    from titanlab.recipe.recipe import Recipe

PREFIX = "estimate."
FIGURES = ("step_seconds", "tokens_per_second", "memory_gib")
# To read so many recipes back takes about three seconds.
_MOST_RECIPES = 80
_TOO_MANY = f"not kept when it was submitted; of older sweeps only {_MOST_RECIPES} recipes are estimated"
_OTHER_LAYOUT = "is that of {layout}, the layout in which it was submitted"
# Parts of a recipe that change no estimate.
_IRRELEVANT = ("name", "sweep", "repeat", "seed", "runs", "tracker", "launch", "checkpoint", "profiler", "init_from")


def estimate_values(recipe: Recipe) -> dict[str, Any]:
    """The estimate of a resolved recipe as plain values: `layout`, the figures, and why there are none."""
    from titanlab.plan.explanation import estimate_or_reason

    values: dict[str, Any] = {"layout": recipe.layout.label, **dict.fromkeys(FIGURES), "note": None}
    try:
        answer = estimate_or_reason(recipe)
    except TitanlabError as error:
        answer = str(error)
    if isinstance(answer, str):
        return {**values, "note": answer}
    seconds = answer.hours * 3600 / recipe.training.steps
    return {
        **values,
        "step_seconds": seconds,
        "tokens_per_second": recipe.tokens_per_step / seconds / recipe.layout.world if seconds > 0 else None,
        "memory_gib": answer.reserved_bytes / 2**30,
    }


def estimate_columns(kept: Mapping[str, Any] | None, layout: str | None) -> dict[str, Any]:
    """The columns of a row.

    Args:
        kept: the estimate that was made for the run; None: none was.
        layout: of the latest attempt, which may have another layout than the estimated one.
    """
    if not isinstance(kept, Mapping):
        return {}
    if layout is not None and kept.get("layout") not in (None, layout):
        return {f"{PREFIX}note": _OTHER_LAYOUT.format(layout=kept["layout"])}
    return {f"{PREFIX}{name}": kept.get(name) for name in (*FIGURES, "note")}


class LateEstimates:
    """Estimates of runs for which none was kept: of sweeps of an earlier version, and of single runs."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The estimate of a frozen recipe; equal recipes are estimated once."""
        key = json.dumps({name: value for name, value in config.items() if name not in _IRRELEVANT}, sort_keys=True)
        if key not in self._known:
            if len(self._known) >= _MOST_RECIPES:
                return {"note": _TOO_MANY}
            self._known[key] = _estimated(config)
        return self._known[key]


def _estimated(config: Mapping[str, Any]) -> dict[str, Any]:
    from titanlab.recipe.recipe import from_mapping

    try:
        return estimate_values(from_mapping(config))
    except (TitanlabError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return {"note": f"its recipe cannot be read ({reason})"}
