"""The content of a report as data: the sweep's rows, its answer, differing configs, and provenance."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from titanlab.errors import TitanlabError
from titanlab.records import RunFolder, redact, redacted_arguments
from titanlab.sweep import (
    RecipeRuns,
    SweepFolder,
    SweepRanking,
    differing,
    fitting_value,
    groups,
    rank,
    runs,
)
from titanlab.system import counted, significant

_MOST_RECIPES = 24


@dataclass(frozen=True)
class Facts:
    """A sweep at one moment, and the answer that its runs give.

    Attributes:
        rows: the rows of the sweep's table, with a value or None in each column.
        made: when the rows were read, in seconds since the epoch.
        by: what ranks the recipes: `tps`, `mfu` or `memory`.
    """

    sweep: SweepFolder
    rows: Sequence[Mapping[str, Any]]
    made: float
    by: str = "tps"
    _metrics: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)

    @cached_property
    def runs(self) -> list[Mapping[str, Any]]:
        """The rows of runs: all rows except those of dropped points."""
        return runs(self.rows)

    @cached_property
    def done(self) -> list[Mapping[str, Any]]:
        return [row for row in self.runs if row["outcome"] == "done" and row["state"] == "ended"]

    @cached_property
    def groups(self) -> list[RecipeRuns]:
        """The recipes, fastest first; recipes without a measured speed are last."""
        # Recipes with oversubscribed or emulated runs come last: the speeds of these say nothing.
        return sorted(
            groups(self.rows),
            key=lambda group: (not group.has_speed, -(group.typical("tokens_per_second") or -1.0)),
        )

    @cached_property
    def shown(self) -> list[tuple[RecipeRuns, Mapping[str, Any]]]:
        """The fastest recipes, at most `_MOST_RECIPES`, each with one run that represents it."""
        return [(group, representative(group)) for group in self.groups[:_MOST_RECIPES]]

    @cached_property
    def ranking(self) -> SweepRanking:
        return rank(self.rows, by=self.by)

    @cached_property
    def speeds(self) -> SweepRanking:
        """The ranking by tokens per second."""
        return self.ranking if self.by == "tps" else rank(self.rows, by="tps")

    @property
    def best(self) -> RecipeRuns | None:
        """The recipe that is ranked first; if none is ranked, one with a finished run. None: no run is finished."""
        if self.ranking.first is not None:
            return self.ranking.first.group
        ended = (entry.group for entry in self.ranking.entries if representative(entry.group)["outcome"] == "done")
        return next(ended, None)

    @cached_property
    def bands(self) -> Mapping[str, tuple[float, float]]:
        """By a recipe's label, the interval of 95 % around its mean of tokens per second."""
        return {
            entry.label: (entry.low, entry.high)
            for entry in self.speeds.ranked
            if entry.low is not None and entry.high is not None and math.isfinite(entry.high)
        }

    @property
    def band_text(self) -> str:
        """A sentence that says what the intervals are and how they were computed."""
        noise, degrees = significant(self.speeds.noise_percent or 0, 2), self.speeds.degrees
        return (
            f"The line with ends is the interval of 95 % around a recipe's mean, from a noise of {noise} % "
            f"between runs of one recipe, pooled over all that have repeats ({counted(degrees, 'degree')} of freedom)."
        )

    def run(self, row: Mapping[str, Any]) -> RunFolder:
        return self.sweep.run(str(row["run"]))

    def config(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """The config of a run's latest attempt; None: it cannot be read."""
        run, attempt = self.run(row), row["attempt"] or None
        try:
            return run.config(attempt if attempt and run.attempt_folder(attempt).is_dir() else None)
        except (TitanlabError, OSError):
            return None

    def env(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Code, versions and machine of a run's latest attempt; empty: it cannot be read."""
        return self.run(row).env(row["attempt"] or None) or {}

    def metrics(self, row: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
        """The rows of a run's metrics.jsonl of one kind; empty: the file cannot be read."""
        name = str(row["run"])
        if name not in self._metrics:
            try:
                self._metrics[name] = self.run(row).metrics()
            except (TitanlabError, OSError):
                self._metrics[name] = []
        return [metrics for metrics in self._metrics[name] if metrics["kind"] == kind]


def representative(group: RecipeRuns) -> Mapping[str, Any]:
    """One run of the recipe, if possible one that is done."""
    return next((row for row in group.rows if row["outcome"] == "done"), group.rows[0])


def checked(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with None for each value that has the wrong type for its column, or is not finite."""

    def sound(name: str, value: Any) -> Any:
        value = fitting_value(name, value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [{name: sound(name, value) for name, value in row.items()} for row in rows]


# Config keys that name a run or its folder, but do not change what the run computes.
_NAMES = ("name", "sweep", "runs", "repeat", "notes")
_MOST_LETTERS = 200


def differences(
    facts: Facts, reference: Mapping[str, Any]
) -> list[tuple[RecipeRuns, list[tuple[str, str, str]] | None]] | None:
    """For each recipe: key, the reference's value and the recipe's value, for every key that differs.

    None for a recipe: its config.yaml cannot be read; None for all: the reference's config.yaml cannot be read.
    """
    config = facts.config(reference)
    if config is None:
        return None

    def shown(text: str) -> str:
        text = redact(text)
        return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"

    def items(group: RecipeRuns) -> list[tuple[str, str, str]] | None:
        is_reference = reference["run"] in (row["run"] for row in group.rows)
        other = facts.config(reference if is_reference else representative(group))
        if other is None:
            return None
        return [(key, shown(old), shown(new)) for key, old, new in differing(config, other, _NAMES)]

    return [(group, items(group)) for group in facts.groups]


def sources(facts: Facts) -> list[dict[str, Any]]:
    """The runs grouped by code, versions and machine, the largest group first; without runs that never began.

    A row has these facts by name, then `runs` (folder names), `began` (of the first run) and `ended` (of the last run).
    """
    members: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for row in facts.runs:
        if env := facts.env(row):
            members.setdefault(tuple(_origin(row, env).items()), []).append(row)
    return [
        {
            **dict(origin),
            "runs": [str(row["run"]) for row in rows],
            "began": moment(min((row["started"] for row in rows if row["started"]), default=None)),
            "ended": moment(max((row["ended"] for row in rows if row["ended"]), default=None)),
        }
        for origin, rows in sorted(members.items(), key=lambda item: -len(item[1]))
    ]


def command_line(facts: Facts) -> str:
    """The command line of the sweep; empty: runs were started one by one."""
    overrides = facts.sweep.manifest().get("overrides")
    if not isinstance(overrides, list) or not overrides:
        return ""
    return " ".join(["titanlab sweep", *redacted_arguments(list(map(str, overrides)))])


def moment(seconds: float | None) -> str:
    """A time as text, in UTC; empty: the time is unknown."""
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def _origin(row: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, str]:
    def known(*keys: str) -> str:
        """The value at a path of keys as text; empty if it is missing, because the file may have any content."""
        value: Any = env
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return "" if value is None else str(value)

    commit, branch, cores = (
        known("code", "git", "sha")[:12],
        known("code", "git", "branch"),
        known("host", "usable_cores"),
    )
    if commit:
        commit += f" ({branch})" if branch else ""
        commit += ", with changes" if known("code", "git", "dirty") == "True" else ""
    machine = ", ".join(filter(None, [known("host", "cpu"), f"{cores} cores" if cores else ""]))
    return {
        "code": known("code", "fingerprint")[:12],
        "commit": commit,
        "titanlab": known("code", "version"),
        "torch": known("packages", "torch"),
        "Python": known("python", "version"),
        "device": str(row["device"] or row["accelerator"] or ""),
        "host": known("host", "name") + (f" ({machine})" if machine else ""),
        "launcher": str(row["launcher"] or ""),
    }
