"""Where the recipe of each group of runs differs from the best one's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from titanlab.records.provenance import redact
from titanlab.report.page.facts import Facts, representative

# Keys that say who a run is, or where it is kept, and not what it computes.
_NAMES = ("name", "sweep", "runs", "repeat")
_MISSING = "–"
_MOST_LETTERS = 200


class Difference(NamedTuple):
    """One key whose value is not the reference's."""

    key: str
    reference: str
    value: str


class Differences(NamedTuple):
    """What one recipe has otherwise than the reference.

    Attributes:
        label: of the recipe.
        runs: names of its folders.
        items: the keys; None: its config.yaml cannot be read.
    """

    label: str
    runs: Sequence[str]
    items: Sequence[Difference] | None


def differences(facts: Facts, reference: Mapping[str, Any]) -> list[Differences] | None:
    """The differences of all recipes to that of a run; None: the run's config.yaml cannot be read."""
    config = facts.config(reference)
    if config is None:
        return None
    reference_values = dict(_flat(config))
    comparison = []
    for group in facts.groups:
        names = [str(row["run"]) for row in group.rows]
        other = facts.config(reference if reference["run"] in names else representative(group))
        items = None if other is None else _between(reference_values, dict(_flat(other)))
        comparison.append(Differences(group.label, names, items))
    return comparison


def _between(reference: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    keys = [*other, *(key for key in reference if key not in other)]
    return [
        Difference(key, _text(reference, key), _text(other, key))
        for key in keys
        if key.partition(".")[0] not in _NAMES and _is_other(reference.get(key, _NAMES), other.get(key, _NAMES))
    ]


def _is_other(value: Any, other: Any) -> bool:
    """Whether two values differ: 1 is equal to 1.0, but not to true, and a value that is no number to itself."""
    if isinstance(value, bool) is not isinstance(other, bool):
        return True
    return bool(value != other) and not (value != value and other != other)


def _flat(value: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _text(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return _MISSING
    value = values[key]
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = redact(text)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"
