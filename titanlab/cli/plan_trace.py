"""`titanlab plan --trace`: one step of a recipe on tensors without data, against what the planner declares."""

from __future__ import annotations

import json
from collections.abc import Sequence

from titanlab.costs.traffic_account import lines
from titanlab.errors import ConfigError
from titanlab.prove.traced_step import Comparison, comparison_rows, comparison_values, trace
from titanlab.recipe.recipe import Recipe
from titanlab.sweep.listing import aligned
from titanlab.system.terminal import Console
from titanlab.system.text import counted

_FIGURES = ("declared", "traced", "difference")


def run_trace(recipe: Recipe, ranks: str, console: Console, *, as_json: bool) -> int:
    """Trace, print the table, and return 0 if all figures are equal, else 1.

    Args:
        ranks: numbers with commas between them; empty: the first rank of each pipeline stage.

    Raises:
        ConfigError: there is no such rank, or the recipe cannot be traced.
    """
    comparison = trace(recipe, _numbers(ranks))
    if as_json:
        console.note(json.dumps(comparison_values(comparison), indent=2, ensure_ascii=False))
    else:
        console.note("\n".join(_lines(comparison)))
    return 1 if comparison.differing else 0


def _numbers(text: str) -> list[int] | None:
    try:
        return [int(part) for part in text.split(",")] if text else None
    except ValueError:
        raise ConfigError("--rank", text, "must be whole numbers with commas between them", "try --rank 0") from None


def _lines(comparison: Comparison) -> Sequence[str]:
    recipe, items, differing = comparison.recipe, comparison.items, comparison.differing
    text = [f"{recipe.name}: {recipe.layout.label}, one step of {counted(len(comparison.pairs), 'rank')} traced"]
    text += comparison.notes
    text += ["", *aligned(("rank", "item", *_FIGURES), comparison_rows(items), right=("rank", *_FIGURES)), ""]
    for _, traced in comparison.pairs:
        text += [
            f"the optimizer of rank {traced.rank}, for which nothing is declared: {line}"
            for line in lines(traced.update_traffic)
        ]
    if not differing:
        return [*text, f"all {len(items)} figures are equal"]
    places = ", ".join(f"rank {item.rank}: {item.name}" for item in differing[:5])
    more = f", and {len(differing) - 5} more" if len(differing) > 5 else ""
    return [*text, f"{len(differing)} of {len(items)} figures differ: {places}{more}"]
