"""Says whether techniques can be combined: names the rule that refuses them, or the test that proves them.

A small recipe with the techniques is composed and checked as by `titanlab train`: both refuse the same combinations.
Tested combinations are read from the tables in docs/parity.md and docs/techniques.md, which the parity tests write.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import titanlab
from titanlab.costs import AXES, Layout
from titanlab.errors import ConfigError
from titanlab.recipe import Loader, Recipe, check, read_flags, resolve
from titanlab.sweep.composer import Composer
from titanlab.sweep.space import Values

# A B200 supports every number format. To ask about a CPU, pass `cluster=cpu`.
_BASE = ("data=synthetic", "checkpoint=off", "cluster=b200", "training.steps=2", "training.seq_len=256")
# Four layers allow four pipeline stages. Half of each width is a multiple of the 256 numbers that share a scale.
_SIZES = ("model.layers=4", "model.dim=512", "model.ffn_dim=1024")
_COMPILED = {"compile": "block"}
_SHARD, _TENSOR, _CONTEXT = ({f"parallelism.{axis}": 2} for axis in ("shard", "tensor", "context"))
# Techniques that are not options of a config group. Options are named as on the command line: `precision=bf16`.
_OWN: Mapping[str, Values] = {
    "ddp": {"parallelism.replicate": 2},
    "fsdp": _SHARD,
    "hsdp": {"parallelism.replicate": 2, **_SHARD},
    "tp": _TENSOR,
    "tp_without_sp": {**_TENSOR, "parallelism.sequence_parallel": False},
    "tp_without_loss_parallel": {**_TENSOR, "parallelism.loss_parallel": False},
    "async_tp": {**_TENSOR, "parallelism.async_tensor": True, **_COMPILED},
    "cp": _CONTEXT,
    "cp_all_gather": {**_CONTEXT, "parallelism.context_method": "all_gather"},
    "ep": {"model": "qwen3_moe_debug", **_SHARD, "parallelism.expert": 2},
    "cpu_offload": {**_SHARD, "parallelism.cpu_offload": True},
    "reduce_each": {**_SHARD, "parallelism.reduce_gradients": "each", "training.microbatch": 1},
    "document_mask": {"data.document_mask": True},
    "loss_chunk": {"training.loss_chunk": 64},
    "compile": _COMPILED,
}
# Config groups whose options are techniques, and the values without which the options have no effect.
_GROUPS: Mapping[str, Values] = {"schedule": {"parallelism.pipeline": 2}, "precision": {}, "ac": {}, "optimizer": {}}
_NEEDED: Mapping[str, Values] = {"ac=memory_budget": _COMPILED}
# Not techniques: three are the small recipe's defaults, and `csv` is a schedule that the user writes.
_LEFT_OUT = ("precision=fp32", "ac=none", "optimizer=adamw", "schedule=csv")
PROVEN, WORKS, REFUSED, INCLUDED, EITHER = "proven", "works", "refused", "included", "either"
# Each answer's mark in the table, and its meaning.
VERDICTS = {
    PROVEN: ("P", "works, and a row of docs/parity.md or docs/techniques.md compares it with one process"),
    WORKS: ("w", "no rule refuses it, and no row has all of it"),
    REFUSED: ("X", "by a rule"),
    INCLUDED: ("=", "one of the two has the other in it"),
    EITHER: ("|", "one or the other, because both set the same key"),
}
PAGES = ("parity.md", "techniques.md")
_OF_MODELS = {"fused, in tiles": "model.fused", "tied embeddings": "model.tied_embeddings"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tested combination of features: a row of a table in docs/. Its `number` stands in the table's first column."""

    page: str
    number: int
    features: frozenset[str]

    def __str__(self) -> str:
        return f"row {self.number} of docs/{self.page}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Whether techniques can be combined: one of `VERDICTS`, and the row that proves it or the rule that refuses it."""

    verdict: str
    why: str = ""


class _ConflictError(Exception):
    """Two techniques set a field to different values."""


class Combinations:
    """Techniques, by name, and their combinations.

    Args:
        overrides: change the small recipe, such as `cluster=cpu`; flags such as `--config-dir FOLDER` are allowed.
    """

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        flags = read_flags(overrides)
        self._keys = {override.partition("=")[0] for override in flags.overrides}
        self._loader = Loader(flags, [*_BASE, *(() if "model" in self._keys else _SIZES), *flags.overrides])
        self.techniques: dict[str, Values] = dict(_OWN)
        for group, needed in _GROUPS.items():
            for option in self._loader.options(group):
                if (name := f"{group}={option}") not in _LEFT_OUT:
                    self.techniques[name] = {**needed, **_NEEDED.get(name, {}), group: option}
        # Compose the small recipe: the loader then knows which groups have an option, and which need a `+`.
        self._loader.base()
        self._usual = functools.cache(lambda: features(self.recipe({})))
        self._composer: Composer | None = None

    def point(self, words: Sequence[str]) -> Values:
        """The values that words set, by key. A word is the name of a technique, or an override.

        Raises:
            ConfigError: a word is neither a technique nor an override, or asks for several recipes.
        """
        named: dict[str, Any] = {}
        others = [word for word in words if word not in self.techniques]
        for word in words:
            named.update(self.techniques.get(word, {}))
        for word in others:
            if "=" not in word:
                options = [name for name in self.techniques if name.endswith(f"={word}")]
                near = options or difflib.get_close_matches(word, self.techniques, n=1)
                cure = "".join(f"try {name}; " for name in near) + f"known: {', '.join(self.techniques)}"
                raise ConfigError("technique", word, "there is no such technique", cure)
        for word, parsed in zip(others, self._loader.parse(others), strict=True):
            key = parsed.key_or_group
            if key in ("recipe", "sweeps") or parsed.is_sweep_override():
                rule = "is more than a technique, and a small recipe is composed here"
                raise ConfigError("technique", word, rule, "try `titanlab train … --dry-run`")
            named[key] = parsed.value()
        return named

    def ask(self, point: Values) -> Answer:
        """Whether the values of a point can be combined; ConfigError: they compose no recipe."""
        return self._answer(self._composed(point))

    def pair(self, one: Values, other: Values) -> Answer:
        """Whether the values of two points can be combined."""
        self._composer = self._composer or Composer(self._loader, [{}, one, other, *self.techniques.values()])
        base, first, second = map(self._composed, ({}, one, other))
        try:
            if any(one[key] != other[key] for key in one.keys() & other.keys()):
                raise _ConflictError
            both = _merged(base, first, second)
        except _ConflictError:
            return Answer(verdict=EITHER)
        return Answer(verdict=INCLUDED) if both in (first, second) else self._answer(both)

    def table(self) -> dict[tuple[str, str], Answer]:
        """The answer for each pair of names of techniques; in a pair the later technique comes first."""
        names = list(self.techniques)
        pairs = [(one, other) for place, one in enumerate(names) for other in names[:place]]
        return {pair: self.pair(*(self.techniques[name] for name in pair)) for pair in pairs}

    def proven_pairs(self, point: Values) -> list[tuple[str, str]]:
        """Pairs of a recipe's features, each with the row that proves it; ConfigError: a rule refuses the recipe."""
        # Omit `pipeline`: its schedule is a feature already.
        wanted = sorted(features(self.recipe(point)) - self._usual() - {"pipeline"})
        pairs = itertools.combinations(wanted, 2)
        return [(" × ".join(pair).replace(".kind", ""), str(_proving({*pair}) or "no row")) for pair in pairs]

    def recipe(self, point: Values) -> Recipe:
        """The resolved small recipe; raises ConfigError if a rule refuses it."""
        return self._checked(self._composed(point))

    def _composed(self, point: Values) -> Recipe:
        if "model" in self._keys:
            point = {key: value for key, value in point.items() if key != "model"}
        return (self._composer or Composer(self._loader, [point])).recipe(point)

    def _checked(self, recipe: Recipe) -> Recipe:
        degrees = recipe.parallelism.degrees().values()
        product = math.prod(degree for degree in degrees if degree != -1)
        # Assume 2 for a degree of -1.
        world = recipe.world or (2 * product if -1 in degrees else product)
        resolved = resolve(dataclasses.replace(recipe, world=world), world=None, accelerator="cpu", device="cpu")
        if "training.global_batch" not in self._keys:
            batch = 4 * resolved.layout.data * resolved.layout.pipeline
            training = dataclasses.replace(resolved.training, global_batch=batch)
            resolved = dataclasses.replace(resolved, training=training)
        check(resolved)
        return resolved

    def _answer(self, recipe: Recipe) -> Answer:
        try:
            resolved = self._checked(recipe)
        except ConfigError as error:
            return Answer(verdict=REFUSED, why=str(error))
        row = _proving(features(resolved) - self._usual())
        return Answer(verdict=WORKS) if row is None else Answer(verdict=PROVEN, why=str(row))


def _proving(wanted: Set[str]) -> Row | None:
    """The row that has all wanted features and the fewest others; None: there is none."""
    proving = [row for row in rows() if wanted and wanted <= row.features]
    return min(proving, key=lambda row: len(row.features), default=None)


def _merged(base: Any, one: Any, other: Any) -> Any:
    """The base config with the changes of both others; raises _ConflictError if they change a field differently."""
    if one in (base, other):
        return other
    if other == base:
        return one
    if not (hasattr(base, "__dataclass_fields__") and type(base) is type(one) is type(other)):
        raise _ConflictError
    names = [field.name for field in dataclasses.fields(base)]
    values = {name: _merged(*(getattr(config, name) for config in (base, one, other))) for name in names}
    return dataclasses.replace(base, **values)


def features(recipe: Recipe) -> frozenset[str]:
    """The features of a resolved recipe, without sizes, in the same words as `Row.features`."""
    found = {*_axes(recipe.layout), f"model.kind={recipe.model.kind}"}
    groups = [*_GROUPS, "parallelism", "data", "training", "compile"]
    if recipe.layout.pipeline == 1:
        groups.remove("schedule")
    for group in groups:
        config = getattr(recipe, group)
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            # The choice of compiler, and whether it also compiles the loss, are not features.
            if f"{group}.{field.name}" in ("compile.backend", "compile.loss"):
                continue
            if isinstance(value, bool | str) and (field.name == "kind" or value != field.default):
                found.add(f"{group}.{field.name}={value}")
    found.update(f"{key}=True" for key in _OF_MODELS.values() if getattr(recipe.model, key.partition(".")[2], False))
    if recipe.layout.expert > 1:
        found.add("expert")
    if recipe.loss_chunk:
        found.add("loss_chunk")
    return frozenset(found)


def _axes(layout: Layout) -> set[str]:
    axes = {axis for axis, degree in layout.degrees().items() if degree > 1}
    data = {"replicate": "ddp", "shard": "fsdp", "replicate shard": "hsdp"}
    name = data.get(" ".join(sorted(axes & {"replicate", "shard"})))
    return axes - {"replicate", "shard"} | ({name} if name else set())


@functools.cache
def rows() -> tuple[Row, ...]:
    """All rows of `PAGES`. In a clone, docs/ is beside the package; in an installed wheel, inside the package."""
    package, found = Path(titanlab.__file__).parent, []
    folder = package / "docs" if (package / "docs").is_dir() else package.parent / "docs"
    for page in PAGES:
        lines = (folder / page).read_text(encoding="utf-8").splitlines()
        cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("| ")]
        for number, *row in cells[1:]:
            found.append(Row(page=page, number=int(number), features=_features_of_row(page, row)))
    return tuple(found)


def _features_of_row(page: str, cells: Sequence[str]) -> frozenset[str]:
    # Remove splits such as `[1, 3]`: their commas do not separate options.
    label, *given = re.sub(r"\[.*?\]", "", cells[1] if page == "parity.md" else cells[0]).split(", ")
    axes = {"dp_r": "replicate", "dp_s": "shard", "cp": "context", "tp": "tensor", "pp": "pipeline"}
    degrees = {axes[name]: int(degree) for name, degree in re.findall(r"(\w*[a-z])(\d+)", label)}
    layout = Layout(**{axis: degrees.get(axis, 1) for axis in AXES})
    found = {*_axes(layout), "data.kind=synthetic", "optimizer.kind=adamw", "model.kind=llama"}
    is_layout = page == "parity.md"
    precision, ac, backend = ("fp32", "none", "eager") if is_layout else cells[1:4]
    schedule = "1f1b"
    for option in given:
        name, equals, value = option.partition("=")
        if not equals:
            schedule = name
        elif name not in ("microbatch", "split"):
            found.add(f"parallelism.{name}={value}")
    if layout.pipeline > 1:
        found.add(f"schedule.kind={schedule}")
    if is_layout and cells[0] in _OF_MODELS:
        found.add(f"{_OF_MODELS[cells[0]]}=True")
    if backend != "eager":
        found.add("compile.blocks=True")
    return frozenset({*found, f"precision.kind={precision}", f"ac.kind={ac}"})
