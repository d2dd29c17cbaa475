"""Declared against traced, item by item. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titanlab.costs.traffic_account import Row
from titanlab.recipe.recipe import Recipe
from titanlab.tracing.declared import RankAccount


@dataclass(frozen=True, kw_only=True)
class Item:
    """One figure of a rank.

    Attributes:
        rank: in the world.
        name: `parameters of its stages`, `parameter bytes`, `block 3 saved bytes`, `shard all_gather bytes`, ….
        declared, traced: the figure.
    """

    rank: int
    name: str
    declared: int
    traced: int

    @property
    def difference(self) -> int:
        """Traced less declared."""
        return self.traced - self.declared


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The ranks of one recipe.

    Attributes:
        recipe: as it was traced.
        notes: one line for each difference to the recipe that was asked for.
        pairs: for each rank, its account as declared and as traced.
    """

    recipe: Recipe
    notes: Sequence[str]
    pairs: Sequence[tuple[RankAccount, RankAccount]]

    @property
    def items(self) -> list[Item]:
        """All figures, by rank."""
        return [item for pair in self.pairs for item in _items(*pair)]

    @property
    def differing(self) -> list[Item]:
        """The figures that differ."""
        return [item for item in self.items if item.difference]


def _items(declared: RankAccount, traced: RankAccount) -> Iterator[Item]:
    figures = [
        ("parameters of its stages", declared.parameters, traced.parameters),
        ("parameter bytes", declared.parameter_bytes, traced.parameter_bytes),
        ("optimizer bytes", declared.optimizer_bytes, traced.optimizer_bytes),
        *_saved(declared.saved, traced.saved),
        *_traffic(declared.traffic, traced.traffic),
    ]
    yield from (
        Item(rank=traced.rank, name=name, declared=expected, traced=actual) for name, expected, actual in figures
    )


def _saved(declared: Mapping[int, int], traced: Mapping[int, int]) -> Iterator[tuple[str, int, int]]:
    """One row for neighbouring blocks with the same figures."""
    numbers = sorted({*declared, *traced})
    figures = {number: (declared.get(number, 0), traced.get(number, 0)) for number in numbers}
    start = 0
    for place, number in enumerate(numbers):
        follows = numbers[place + 1] if place + 1 < len(numbers) else None
        if follows == number + 1 and figures[follows] == figures[number]:
            continue
        first = numbers[start]
        start = place + 1
        name = f"block {first}" if first == number else f"each of blocks {first} to {number}"
        yield f"{name}: saved bytes", *figures[number]


def _traffic(declared: Sequence[Row], traced: Sequence[Row]) -> Iterator[tuple[str, int, int]]:
    by_kind = [{(row.axis, row.kind): row for row in rows} for rows in (declared, traced)]
    for axis, kind in dict.fromkeys((*by_kind[0], *by_kind[1])):
        rows = [rows.get((axis, kind)) for rows in by_kind]
        for figure in ("count", "bytes"):
            expected, actual = (0 if row is None else getattr(row, figure) for row in rows)
            yield f"{axis} {kind} {figure}", expected, actual


def comparison_rows(items: Sequence[Item]) -> list[list[str]]:
    """A row of text for each figure."""
    return [
        [
            str(item.rank),
            item.name,
            f"{item.declared:,}",
            f"{item.traced:,}",
            f"{item.difference:+,}" if item.difference else "0",
        ]
        for item in items
    ]


def comparison_values(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain values."""
    return {
        "layout": comparison.recipe.layout.label,
        "notes": list(comparison.notes),
        "equal": not comparison.differing,
        "items": [asdict(item) | {"difference": item.difference} for item in comparison.items],
        "optimizer_traffic": {
            str(traced.rank): [asdict(row) for row in traced.update_traffic] for _, traced in comparison.pairs
        },
    }
