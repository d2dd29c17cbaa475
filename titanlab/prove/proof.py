"""Proofs: reduced recipes that train as one process does, in fp32 and in their own precision. Torch-free.

`parity.json` in the folder of a sweep has the newest proof of every run.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.errors import ConfigError, TitanlabError
from titanlab.prove import tolerances
from titanlab.prove.reduction import (
    Folded,
    Reduced,
    common_sizes,
    comparable,
    fold_label,
    fold_recipe,
    in_fp32,
    missing_axes,
    on_one_process,
    reduce_recipe,
)
from titanlab.recipe.recipe import Recipe, to_mapping
from titanlab.records.claim import claimed
from titanlab.records.json_file import as_typed, read_object
from titanlab.system.files import write_json
from titanlab.techniques.precision.cast_schema import Fp32

if TYPE_CHECKING:
    from titanlab.prove.parity import TraceDifference, TrainingTrace


Train = Callable[[Recipe], "Sequence[TrainingTrace]"]
"""Trains a reduced recipe and returns the trace of every rank; raises TitanlabError if it fails."""

_LINEAR = "torch.nn.modules.linear.Linear"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A resolved recipe in its real size, and the name of its run."""

    run: str
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A reduced recipe that is to be held to one process.

    Attributes:
        run: name of the run.
        layout: the folded layout and the real one, as text.
        reduced: None: it cannot be reduced, for the given reason.
        missing: axes that this layout lacks, which another proof of the run has.
    """

    run: str
    layout: str
    reduced: Reduced | None
    reason: str = ""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProofRow:
    """The result of one proof in one precision.

    Attributes:
        tolerance: of each number; the same for all, or by the number's name.
        reason: why it failed, or what the numbers mean; one line.
    """

    run: str
    layout: str
    precision: str
    passed: bool
    reason: str = ""
    loss: float | None = None
    grad_norm: float | None = None
    gradient: tuple[float, str] | None = None
    parameter: tuple[float, str] | None = None
    tolerance: float | Mapping[str, float] | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def plan_proofs(
    candidates: Sequence[Candidate], *, steps: int, runs: str, most: int, inductor: bool = False
) -> list[Proof]:
    """Fold and reduce recipes. Those that train the same model on the same data get the same sizes.

    Args:
        steps: of each reduced run.
        runs: folder of the reduced runs.
        most: processes of one reduced run.
        inductor: keep inductor, which writes and compiles kernels.

    Raises:
        ConfigError: none can be reduced.
    """
    proofs: list[Proof] = []
    groups: dict[str, list[Folded]] = {}
    errors: list[ConfigError] = []
    for candidate in candidates:
        try:
            for folded in fold_recipe(candidate.run, candidate.recipe, most=most, inductor=inductor):
                key = canonical(comparable(candidate.recipe))
                groups.setdefault(key, []).append(folded)
        except ConfigError as error:
            errors.append(error)
            proofs.append(_unreduced(candidate.run, candidate.recipe.layout.label, error))
    for group in groups.values():
        for part in _sized(group):
            for folded in part:
                label = fold_label(folded.layout, folded.recipe.layout)
                try:
                    reduced = reduce_recipe(folded, common_sizes(part), steps=steps, runs=runs)
                except ConfigError as error:
                    errors.append(error)
                    proofs.append(_unreduced(folded.run, label, error))
                    continue
                missing = tuple(missing_axes(folded.layout, folded.recipe.layout))
                proofs.append(Proof(run=folded.run, layout=label, reduced=reduced, missing=missing))
    if errors and not any(proof.reduced for proof in proofs):
        raise errors[0]
    order = {candidate.run: number for number, candidate in enumerate(candidates)}
    return sorted(proofs, key=lambda proof: order[proof.run])


def _sized(group: list[Folded]) -> list[list[Folded]]:
    """The group as a whole if common sizes exist; otherwise each alone."""
    try:
        common_sizes(group)
    except ConfigError:
        return [[folded] for folded in group]
    return [group]


def _unreduced(run: str, layout: str, error: ConfigError) -> Proof:
    return Proof(run=run, layout=layout, reduced=None, reason=str(error))


class Prover:
    """Proves reduced recipes; equal ones, and references that several share, are trained once.

    Args:
        train: trains a recipe.
    """

    def __init__(self, train: Train) -> None:
        self._train = train
        self._traces: dict[str, Sequence[TrainingTrace] | TitanlabError] = {}

    def rows(self, proof: Proof) -> Iterator[ProofRow]:
        """The row in fp32, and where the recipe has another precision the row in that one."""
        if proof.reduced is None:
            yield ProofRow(run=proof.run, layout=proof.layout, precision="", passed=False, reason=proof.reason)
            return
        recipe = proof.reduced.recipe
        yield self._row(proof, in_fp32(recipe))
        if recipe.precision != Fp32():
            yield self._row(proof, recipe)

    def trained(self, recipe: Recipe) -> Sequence[TrainingTrace]:
        """The traces of all ranks.

        Raises:
            TitanlabError: the run has failed, now or before.
        """
        key = content_key(recipe)
        if key not in self._traces:
            try:
                self._traces[key] = self._train(recipe)
            except TitanlabError as error:
                self._traces[key] = error
        outcome = self._traces[key]
        if isinstance(outcome, TitanlabError):
            raise outcome
        return outcome

    def _row(self, proof: Proof, recipe: Recipe) -> ProofRow:
        named = ProofRow(run=proof.run, layout=proof.layout, precision=recipe.precision.kind, passed=False)
        reference = on_one_process(recipe)
        try:
            one = self.trained(reference)[0]
            exact = self.trained(in_fp32(reference))[0]
            every = self.trained(recipe)
            return _judged(recipe, one, exact, every, named)
        # ValueError: the traces have other tensors, such as no gradient of one.
        except (TitanlabError, ValueError) as error:
            return replace(named, reason=str(error))


def _judged(
    recipe: Recipe, one: TrainingTrace, exact: TrainingTrace, every: Sequence[TrainingTrace], named: ProofRow
) -> ProofRow:
    # Imported here: it imports torch.
    from titanlab.prove.parity import compare, farthest

    difference, from_fp32, rounding = farthest(one, every), farthest(exact, every), compare(exact, one)
    limits = limits_of(recipe, rounding)
    same = set(limits.values())
    reason = wrong_layers(recipe, one, every) or exceeded(difference, limits) or too_exact(recipe, from_fp32, rounding)
    return replace(
        named,
        passed=not reason,
        reason=reason,
        loss=difference.loss,
        grad_norm=difference.grad_norm,
        gradient=difference.gradient,
        parameter=difference.parameter,
        tolerance=same.pop() if len(same) == 1 else limits,
    )


def limits_of(recipe: Recipe, rounding: TraceDifference) -> dict[str, float]:
    """The tolerances of a run by the name of the number, from the distance of its reference from fp32."""
    in_fp32 = tolerances.in_fp32(recipe.optimizer)
    if recipe.precision == Fp32():
        return in_fp32
    fewer = tolerances.in_fewer_bits(
        loss=rounding.loss,
        grad_norm=rounding.grad_norm,
        gradient=rounding.gradient[0],
        parameter=rounding.parameter[0],
    )
    return {name: max(in_fp32[name], fewer[name]) for name in fewer}


def exceeded(difference: TraceDifference, limits: Mapping[str, float]) -> str:
    """The differences that exceed their tolerances, in one line; empty: none does."""
    numbers = {
        "loss": (difference.loss, ""),
        "grad_norm": (difference.grad_norm, ""),
        "gradient": difference.gradient,
        "parameter": difference.parameter,
    }
    parts = [
        f"{name.replace('_', ' ')} differs by {number:.1e}"
        + (f" ({tensor})" if tensor else "")
        + f", more than {limits[name]:.1e}"
        for name, (number, tensor) in numbers.items()
        if not number <= limits[name]
    ]
    return "; ".join(parts)


def wrong_layers(recipe: Recipe, one: TrainingTrace, every: Sequence[TrainingTrace]) -> str:
    """The linear layers whose class is not the one that the precision names; empty: there are none.

    A precision that names no class has to make the same layers as in the one-process run.
    """
    named, products = recipe.precision.layer_class, recipe.precision.products(recipe.model.account())
    expected = {name: _class_of(classes) for name, classes in one.layers.items()}
    if named:
        expected = {name: named if name in products else _LINEAR for name in expected}
    found = {name: _class_of(classes) for trace in every for name, classes in trace.layers.items()}
    wrong = [name for name in expected if found.get(name) != expected[name]]
    if not wrong:
        return ""
    own_class, layer_class = (
        full.rpartition(".")[2] for full in (found.get(wrong[0], "no linear layer"), expected[wrong[0]])
    )
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{wrong[0]} is {own_class}, and precision={recipe.precision.kind} makes it {layer_class}{more}"


def _class_of(classes: Sequence[str]) -> str:
    """The class of a layer: FSDP2 puts one of its own, of the same name with a prefix, before it."""
    return next(name for name in classes if not name.rpartition(".")[2].startswith("FSDP"))


def too_exact(recipe: Recipe, from_fp32: TraceDifference, rounding: TraceDifference) -> str:
    """A line if a run is nearer to fp32 than its precision allows; empty: it is not."""
    least = tolerances.LEAST_ROUNDING * rounding.gradient[0]
    if recipe.precision == Fp32() or from_fp32.gradient[0] >= least:
        return ""
    return (
        f"gradients differ from fp32 by {from_fp32.gradient[0]:.1e} only, and in {recipe.precision.kind} by "
        f"{rounding.gradient[0]:.1e}: it computes in another precision"
    )


def content_key(recipe: Recipe) -> str:
    """Equal for recipes that train alike: all but names and folders."""
    values = to_mapping(recipe)
    for name in ("name", "sweep", "runs", "launch", "tracker", "world"):
        values.pop(name)
    return canonical(values)


def canonical(values: Mapping[str, Any]) -> str:
    """A text that is equal for equal values only."""
    return json.dumps(values, sort_keys=True, default=str)


PARITY_SCHEMA = 1
PARITY_FILE = "parity.json"
_LOCK = ".parity.lock"
_PATIENCE_SECONDS = 10.0
_CURE = "remove that file, and prove the sweep again"


@dataclass(frozen=True, kw_only=True)
class _ParityFile:
    time: str = ""
    reference: str = ""


def read_parity(sweep: Path) -> dict[str, Any] | None:
    """The content of a sweep's parity.json; None if it was never proved.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    path = sweep / PARITY_FILE
    value = read_object(path, cure=_CURE)
    if value is None:
        return None
    as_typed(path, value, _ParityFile, schema=PARITY_SCHEMA, cure=_CURE)
    rows = value.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and isinstance(row.get("run"), str) for row in rows):
        raise ConfigError("rows", type(rows).__name__, f"must be a list of rows in {path}", _CURE)
    return value


def write_parity(sweep: Path, rows: Sequence[Mapping[str, Any]], *, reference: str) -> Path:
    """Write rows into a sweep's parity.json; the rows of runs that were not proved again stay. Returns the file.

    Args:
        rows: of `Row.to_mapping`; all rows of a run replace its earlier ones.
        reference: what the runs were held to.

    Raises:
        ConfigError: an earlier file is damaged, another process writes it for too long, or the folder is read-only.
        OSError: the file cannot be written.
    """
    sweep.mkdir(parents=True, exist_ok=True)
    # Two commands may prove parts of one sweep at the same time.
    with claimed(sweep, "sweep", patience_seconds=_PATIENCE_SECONDS, file=_LOCK):
        earlier = (read_parity(sweep) or {}).get("rows", [])
        now = {row["run"] for row in rows}
        kept = [row for row in earlier if row["run"] not in now]
        value = {
            "schema": PARITY_SCHEMA,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "reference": reference,
            "rows": [*kept, *rows],
        }
        write_json(sweep / PARITY_FILE, value)
    return sweep / PARITY_FILE
