"""What a report is made of: the rows of a sweep's table, checked, and the files of its runs.

Run folders may come from a stranger: a value of another type counts as missing, and a file that cannot be read is a
note in the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from titanlab.errors import TitanlabError
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.columns import COLUMNS, NUMBER, TEXT, TRUTH, WHOLE
from titanlab.sweep.comparison import Group, groups
from titanlab.sweep.listing import runs
from titanlab.sweep.sweep_folder import SweepFolder

# A row that has no column of the name has no such value either, such as the rows of an earlier version.
_TYPES = {column.name: column.type for column in COLUMNS}
_MOST_RECIPES = 24


@dataclass(frozen=True)
class Facts:
    """A sweep at one moment.

    Attributes:
        sweep: its folder.
        rows: of its table, with a value or None in each column.
        made: when they were read, in seconds since the epoch.
    """

    sweep: SweepFolder
    rows: Sequence[Mapping[str, Any]]
    made: float
    _metrics: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)

    @cached_property
    def runs(self) -> list[Mapping[str, Any]]:
        """Rows of runs: all rows but those of dropped points."""
        return runs(self.rows)

    @cached_property
    def done(self) -> list[Mapping[str, Any]]:
        """Rows of the runs that are done."""
        return [row for row in self.runs if row["outcome"] == "done" and row["state"] == "ended"]

    @cached_property
    def groups(self) -> list[Group]:
        """The recipes, fastest first; those without a measured run are last."""
        # Speeds of oversubscribed runs say nothing: they come after the others.
        return sorted(
            groups(self.rows),
            key=lambda group: (group.is_oversubscribed, -(group.typical("tokens_per_second") or -1.0)),
        )

    @cached_property
    def shown(self) -> list[tuple[Group, Mapping[str, Any]]]:
        """The fastest recipes, each with one run that stands for it; their number is limited."""
        return [(group, representative(group)) for group in self.groups[:_MOST_RECIPES]]

    def run(self, row: Mapping[str, Any]) -> RunFolder:
        """The folder of a row's run."""
        return self.sweep.run(str(row["run"]))

    def config(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """The recipe of a run's latest attempt; None: it cannot be read."""
        run = self.run(row)
        attempt = row["attempt"] or None
        try:
            return run.config(attempt if attempt and run.attempt_folder(attempt).is_dir() else None)
        except (TitanlabError, OSError):
            return None

    def env(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Code, versions and machine of a run's latest attempt; empty: it cannot be read."""
        return self.run(row).env(row["attempt"] or None) or {}

    def metrics(self, row: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
        """The rows of a run's metrics.jsonl of one kind; empty: it cannot be read."""
        name = str(row["run"])
        if name not in self._metrics:
            try:
                self._metrics[name] = self.run(row).metrics()
            except (TitanlabError, OSError):
                self._metrics[name] = []
        return [metrics for metrics in self._metrics[name] if metrics["kind"] == kind]


def representative(group: Group) -> Mapping[str, Any]:
    """A run of the recipe, done if one is."""
    return next((row for row in group.rows if row["outcome"] == "done"), group.rows[0])


def checked(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with None for a value that has not its column's type, or is no finite number."""
    return [{name: _checked(value, _TYPES.get(name, "")) for name, value in row.items()} for row in rows]


def _checked(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == TRUTH:
        return value if isinstance(value, bool) else None
    if kind in (WHOLE, NUMBER):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return value if is_number else None
    if kind == TEXT:
        return value if isinstance(value, str) else str(value)
    is_plain = isinstance(value, str | bool) or (isinstance(value, int | float) and math.isfinite(value))
    return value if is_plain else str(value)


def at(value: Any, *keys: str) -> Any:
    """The value below some keys of nested mappings; None if there is none."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
