"""What a report says, as data: the sweep's rows, its answer, differing configs, provenance, and its parity file."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from titanlab.errors import TitanlabError
from titanlab.prove import proof
from titanlab.records.provenance import redact, redacted_arguments
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.columns import COLUMNS, NUMBER, TEXT, TRUTH, WHOLE
from titanlab.sweep.comparison import RecipeRuns, groups
from titanlab.sweep.listing import runs
from titanlab.sweep.ranking import SweepRanking, rank, sentence_of
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.system.text import counted, significant

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
    def groups(self) -> list[RecipeRuns]:
        """The recipes, fastest first; those without a measured run are last."""
        # Speeds of oversubscribed runs say nothing: they come after the others.
        return sorted(
            groups(self.rows),
            key=lambda group: (group.is_oversubscribed, -(group.typical("tokens_per_second") or -1.0)),
        )

    @cached_property
    def shown(self) -> list[tuple[RecipeRuns, Mapping[str, Any]]]:
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


def representative(group: RecipeRuns) -> Mapping[str, Any]:
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


@dataclass(frozen=True)
class Answer:
    """What the runs say.

    Attributes:
        ranking: of the recipes, by what the reader asked for.
        speeds: the same by tokens per second.
    """

    ranking: SweepRanking
    speeds: SweepRanking

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        return sentence_of(self.ranking)

    @property
    def best(self) -> RecipeRuns | None:
        """The recipe with the best figure; if none is ranked, one that has a run that is done. None: no run is done."""
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
        """What the intervals rest on."""
        noise, degrees = significant(self.speeds.noise_percent or 0, 2), self.speeds.degrees
        return (
            f"The line with ends is the interval of 95 % around a recipe's mean, from a noise of {noise} % "
            f"between runs of one recipe, pooled over all that have repeats ({counted(degrees, 'degree')} of freedom)."
        )


def answer_of(facts: Facts, *, by: str) -> Answer:
    """Rank the recipes of a sweep by `tps`, `mfu` or `memory`."""
    ranking = rank(facts.rows, by=by)
    return Answer(ranking, ranking if by == "tps" else rank(facts.rows, by="tps"))


# Keys that say who a run is, or where it is kept, and not what it computes.
_NAMES = ("name", "sweep", "runs", "repeat")
_MISSING = "–"
_MOST_LETTERS = 200


class ConfigDifference(NamedTuple):
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
    items: Sequence[ConfigDifference] | None


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


def _between(reference: Mapping[str, Any], other: Mapping[str, Any]) -> list[ConfigDifference]:
    keys = [*other, *(key for key in reference if key not in other)]
    return [
        ConfigDifference(key, _shown_value(reference, key), _shown_value(other, key))
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


def _shown_value(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return _MISSING
    value = values[key]
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = redact(text)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"


class RunOrigin(NamedTuple):
    """What some runs have in common."""

    code: str
    commit: str
    titanlab: str
    torch: str
    python: str
    device: str
    host: str
    launcher: str


class RunSource(NamedTuple):
    """Runs of one origin."""

    origin: RunOrigin
    runs: list[str]
    began: str
    ended: str


def sources(facts: Facts) -> list[RunSource]:
    """The runs by their origins, the most frequent first; runs that never began have none."""
    members: dict[RunOrigin, list[Mapping[str, Any]]] = {}
    for row in facts.runs:
        env = facts.env(row)
        if env:
            members.setdefault(_origin(row, env), []).append(row)
    source_list = []
    for origin, rows in members.items():
        starts = [row["started"] for row in rows if row["started"]]
        ends = [row["ended"] for row in rows if row["ended"]]
        names = [str(row["run"]) for row in rows]
        source_list.append(RunSource(origin, names, moment(min(starts, default=None)), moment(max(ends, default=None))))
    return sorted(source_list, key=lambda source: -len(source.runs))


def command_line(facts: Facts) -> str:
    """How the sweep was asked for; empty: runs were started one by one."""
    overrides = facts.sweep.manifest().get("overrides")
    if not isinstance(overrides, list) or not overrides:
        return ""
    return " ".join(["titanlab sweep", *redacted_arguments(list(map(str, overrides)))])


def moment(seconds: float | None) -> str:
    """A moment in UTC; empty: unknown."""
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def _origin(row: Mapping[str, Any], env: Mapping[str, Any]) -> RunOrigin:
    git = at(env, "code", "git")
    commit = _text(at(git, "sha"))[:12]
    branch = _text(at(git, "branch"))
    changed = ", with changes" if at(git, "dirty") is True else ""
    name, cpu, cores = (at(env, "host", key) for key in ("name", "cpu", "usable_cores"))
    machine = ", ".join(filter(None, [_text(cpu), f"{_text(cores)} cores" if cores is not None else ""]))
    return RunOrigin(
        code=_text(at(env, "code", "fingerprint"))[:12],
        commit=(commit + (f" ({branch})" if branch else "") + changed) if commit else "",
        titanlab=_text(at(env, "code", "version")),
        torch=_text(at(env, "packages", "torch")),
        python=_text(at(env, "python", "version")),
        device=_text(row["device"]) or _text(row["accelerator"]),
        host=_text(name) + (f" ({machine})" if machine else ""),
        launcher=_text(row["launcher"]),
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value)


class ParityRow(NamedTuple):
    """One comparison, in words."""

    run: str
    layout: str
    precision: str
    loss: str
    grad_norm: str
    gradient: str
    parameter: str
    tolerance: str
    verdict: str
    reason: str


class Parity(NamedTuple):
    """The comparisons of a sweep.

    Attributes:
        note: why there are none; empty: there are some.
    """

    time: str = ""
    reference: str = ""
    rows: tuple[ParityRow, ...] = ()
    note: str = ""


def read_parity(folder: Path) -> Parity | None:
    """The comparisons in a sweep's folder; None: there is no file. A damaged file is a note."""
    try:
        value = proof.read_parity(folder)
    except TitanlabError as error:
        return Parity(note=f"{proof.PARITY_FILE} cannot be read: {error}")
    if value is None:
        return None
    return Parity(value["time"], value["reference"], tuple(map(_row, value["rows"])))


def _row(row: Mapping[str, Any]) -> ParityRow:
    passed = row.get("passed")
    return ParityRow(
        run=str(row.get("run") or ""),
        layout=str(row.get("layout") or ""),
        precision=str(row.get("precision") or ""),
        loss=_number(row.get("loss")),
        grad_norm=_number(row.get("grad_norm")),
        gradient=_largest(row.get("gradient")),
        parameter=_largest(row.get("parameter")),
        tolerance=_tolerance(row.get("tolerance")),
        verdict="PASS" if passed is True else "FAIL" if passed is False else "unknown",
        reason=str(row.get("reason") or ""),
    )


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:.2g}"


def _largest(value: Any) -> str:
    """A pair of the largest difference and the name of its tensor."""
    if isinstance(value, list) and len(value) == 2:
        name = f" ({value[1]})" if value[1] else ""
        return f"{_number(value[0])}{name}"
    return _number(value)


def _tolerance(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_number(inner)}" for key, inner in value.items())
    return _number(value)
