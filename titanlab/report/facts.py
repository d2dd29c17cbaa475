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
    sentence_of,
)
from titanlab.system import counted, significant

_MOST_RECIPES = 24


@dataclass(frozen=True)
class Facts:
    """A sweep at one moment.

    Attributes:
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
        return [row for row in self.runs if row["outcome"] == "done" and row["state"] == "ended"]

    @cached_property
    def groups(self) -> list[RecipeRuns]:
        """The recipes, fastest first; those without a measured run are last."""
        # Oversubscribed runs come last: their speeds say nothing about the layout.
        return sorted(
            groups(self.rows),
            key=lambda group: (group.is_oversubscribed, -(group.typical("tokens_per_second") or -1.0)),
        )

    @cached_property
    def shown(self) -> list[tuple[RecipeRuns, Mapping[str, Any]]]:
        """The fastest recipes, each with one run that stands for it; their number is limited."""
        return [(group, representative(group)) for group in self.groups[:_MOST_RECIPES]]

    def run(self, row: Mapping[str, Any]) -> RunFolder:
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


def representative(group: RecipeRuns) -> Mapping[str, Any]:
    """A run of the recipe, done if one is."""
    return next((row for row in group.rows if row["outcome"] == "done"), group.rows[0])


def checked(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with None in place of a value of another type than its column's, or that is not finite."""
    sound = [{name: fitting_value(name, value) for name, value in row.items()} for row in rows]
    return [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in sound
    ]


def at(value: Any, *keys: str) -> Any:
    """The value below some keys of nested mappings; None if there is none."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


@dataclass(frozen=True)
class Answer:
    """The answer that the runs give.

    Attributes:
        ranking: of the recipes, by the figure that the reader chose.
        speeds: the same by tokens per second.
    """

    ranking: SweepRanking
    speeds: SweepRanking

    @property
    def sentence(self) -> str:
        return sentence_of(self.ranking)

    @property
    def best(self) -> RecipeRuns | None:
        """The recipe with the best figure; if none is ranked, one with a finished run. None: no run is finished."""
        if self.ranking.first is not None:
            return self.ranking.first.group
        groups_done = (
            entry.group for entry in self.ranking.entries if any(row["outcome"] == "done" for row in entry.group.rows)
        )
        return next(groups_done, None)

    @cached_property
    def bands(self) -> Mapping[str, tuple[float, float]]:
        """The interval of 95 % of a recipe's tokens per second, by its label."""
        return {
            entry.label: (entry.low, entry.high)
            for entry in self.speeds.ranked
            if entry.low is not None and entry.high is not None and math.isfinite(entry.high)
        }

    @property
    def band_text(self) -> str:
        """The basis of the intervals."""
        noise, degrees = significant(self.speeds.noise_percent or 0, 2), self.speeds.degrees
        return (
            f"The line with ends is the interval of 95 % around a recipe's mean, from a noise of {noise} % "
            f"between runs of one recipe, pooled over all that have repeats ({counted(degrees, 'degree')} of freedom)."
        )


def answer_of(facts: Facts, *, by: str) -> Answer:
    """Rank the recipes of a sweep by `tps`, `mfu` or `memory`."""
    ranking = rank(facts.rows, by=by)
    return Answer(ranking, ranking if by == "tps" else rank(facts.rows, by="tps"))


# Keys that name a run or its place, but do not change what it computes.
_NAMES = ("name", "sweep", "runs", "repeat")
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
    comparison = []
    for group in facts.groups:
        is_reference = reference["run"] in (row["run"] for row in group.rows)
        other = facts.config(reference if is_reference else representative(group))
        items = None
        if other is not None:
            items = [(key, _shown(old), _shown(new)) for key, old, new in differing(config, other, _NAMES)]
        comparison.append((group, items))
    return comparison


def _shown(text: str) -> str:
    text = redact(text)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"


def sources(facts: Facts) -> list[dict[str, Any]]:
    """The runs by code, versions and machine, the most frequent first; runs that never began have none.

    Each has these by name, then `runs` (names of their folders), `began` (the first) and `ended` (the last).
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
    """In UTC; empty: unknown."""
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def _origin(row: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, str]:
    git = at(env, "code", "git")
    commit, branch = _text(at(git, "sha"))[:12], _text(at(git, "branch"))
    changed = ", with changes" if at(git, "dirty") is True else ""
    name, cpu, cores = (at(env, "host", key) for key in ("name", "cpu", "usable_cores"))
    machine = ", ".join(filter(None, [_text(cpu), f"{_text(cores)} cores" if cores is not None else ""]))
    return {
        "code": _text(at(env, "code", "fingerprint"))[:12],
        "commit": (commit + (f" ({branch})" if branch else "") + changed) if commit else "",
        "titanlab": _text(at(env, "code", "version")),
        "torch": _text(at(env, "packages", "torch")),
        "Python": _text(at(env, "python", "version")),
        "device": _text(row["device"]) or _text(row["accelerator"]),
        "host": _text(name) + (f" ({machine})" if machine else ""),
        "launcher": _text(row["launcher"]),
    }


def _text(value: Any) -> str:
    return "" if value is None else str(value)
