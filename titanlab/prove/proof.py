"""Proves that reduced recipes train as one process does, or rehearses recipes to find failures early. Torch-free."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.errors import TitanlabError
from titanlab.prove import tolerances
from titanlab.prove.reduction import Candidate, Reduced, in_fp32, on_one_process, reduce_all
from titanlab.recipe import Recipe, to_mapping
from titanlab.records import OutcomeKind, claimed, read_typed, write_typed
from titanlab.techniques.precision.cast_schema import Fp32

if TYPE_CHECKING:
    from titanlab.prove.forked import Ended
    from titanlab.prove.parity import TraceDifference, TrainingTrace


Train = Callable[[Recipe], "Sequence[TrainingTrace]"]
"""Trains a reduced recipe and returns the trace of every rank; raises TitanlabError if it fails."""

OK = "ok"
FAILED = "failed"
STEPS = 3
_LINEAR = "torch.nn.modules.linear.Linear"


@dataclass(frozen=True, kw_only=True)
class ProofRow:
    """The result of one proof in one precision; in a file, a number that is not finite is None."""

    run: str
    layout: str
    precision: str
    passed: bool
    reason: str = ""  # why the proof failed, or what the numbers mean; one line
    loss: float | None = None
    grad_norm: float | None = None
    gradient: tuple[float | None, str] | None = None
    parameter: tuple[float | None, str] | None = None
    tolerance: float | Mapping[str, float] | None = None  # the same for all numbers, or by the number's name


def plan_proofs(candidates: Sequence[Candidate], **given: Any) -> list[Reduced]:
    """The reduced recipes to compare with a one-process run; `given`: the arguments of `reduce_all`.

    Raises:
        ConfigError: no recipe can be reduced.
    """
    cases = reduce_all(candidates, alike=True, **given)
    errors = [case.error for case in cases if case.error is not None]
    if errors and len(errors) == len(cases):
        raise errors[0]
    return cases


class Prover:
    """Proves reduced recipes; trains equal recipes, and shared references, only once."""

    def __init__(self, train: Train) -> None:
        self._train = train
        self._traces: dict[str, Sequence[TrainingTrace] | TitanlabError] = {}

    def rows(self, case: Reduced) -> Iterator[ProofRow]:
        """The result of the recipe in fp32, and that of the recipe's own precision if it is another one."""
        recipe = case.recipe
        if recipe is None:
            yield ProofRow(run=case.run, layout=case.layout, precision="", passed=False, reason=str(case.error))
            return
        yield self._row(case, in_fp32(recipe))
        if recipe.precision != Fp32():
            yield self._row(case, recipe)

    def trained(self, recipe: Recipe) -> Sequence[TrainingTrace]:
        """The traces of all ranks. TitanlabError: the run has failed, now or before."""
        key = content_key(recipe)
        if key not in self._traces:
            try:
                self._traces[key] = self._train(recipe)
            except TitanlabError as error:
                self._traces[key] = error
        if isinstance(outcome := self._traces[key], TitanlabError):
            raise outcome
        return outcome

    def _row(self, case: Reduced, recipe: Recipe) -> ProofRow:
        named = ProofRow(run=case.run, layout=case.layout, precision=recipe.precision.kind, passed=False)
        reference = on_one_process(recipe)
        try:
            one = self.trained(reference)[0]
            exact = self.trained(in_fp32(reference))[0]
            every = self.trained(recipe)
            # Imported here, because `parity` imports torch.
            from titanlab.prove.parity import compare, farthest

            difference, from_fp32, rounding = farthest(one, every), farthest(exact, every), compare(exact, one)
        # ValueError: the traces have different tensors, such as a missing gradient.
        except (TitanlabError, ValueError) as error:
            return replace(named, reason=str(error))
        if recipe.precision == Fp32():
            limits = tolerances.in_fp32(recipe.optimizer)
        else:
            distances = {name: number for name, (number, _) in named_numbers(rounding)}
            limits = tolerances.in_fewer_bits(recipe.optimizer, distances)
        same = set(limits.values())
        reason = (
            wrong_layers(recipe, one, every) or exceeded(difference, limits) or too_exact(recipe, from_fp32, rounding)
        )
        return replace(
            named,
            passed=not reason,
            reason=reason,
            **vars(difference),
            tolerance=same.pop() if len(same) == 1 else limits,
        )


def named_numbers(difference: TraceDifference) -> Iterator[tuple[str, tuple[float, str]]]:
    """(name, (value, tensor)) for each number of a difference; `tensor` is empty for a number of the whole step."""
    for name, value in vars(difference).items():
        yield name, value if isinstance(value, tuple) else (value, "")


def exceeded(difference: TraceDifference, limits: Mapping[str, float]) -> str:
    """The differences that exceed their tolerances, in one line; empty: none does."""
    parts = []
    for name, (number, tensor) in named_numbers(difference):
        if not number <= limits[name]:
            of = f" ({tensor})" if tensor else ""
            parts.append(f"{name.replace('_', ' ')} differs by {number:.1e}{of}, more than {limits[name]:.1e}")
    return "; ".join(parts)


def wrong_layers(recipe: Recipe, one: TrainingTrace, every: Sequence[TrainingTrace]) -> str:
    """A line about linear layers whose class is not the one that the precision uses; empty: none.

    If the precision names no class, the layers must have the same classes as in the one-process run.
    """
    named, products = recipe.precision.layer_class, recipe.precision.products(recipe.model.account())
    expected = {name: _class_of(classes) for name, classes in one.layers.items()}
    if named:
        expected = {name: named if name in products else _LINEAR for name in expected}
    found = {name: _class_of(classes) for trace in every for name, classes in trace.layers.items()}
    wrong = [name for name in expected if found.get(name) != expected[name]]
    if not wrong:
        return ""
    own_class = found.get(wrong[0], "no linear layer").rpartition(".")[2]
    layer_class = expected[wrong[0]].rpartition(".")[2]
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{wrong[0]} is {own_class}, and precision={recipe.precision.kind} makes it {layer_class}{more}"


def _class_of(classes: Sequence[str]) -> str:
    """The class of a layer, without FSDP2's derived class, which has the same name with a prefix."""
    return next(name for name in classes if not name.rpartition(".")[2].startswith("FSDP"))


def too_exact(recipe: Recipe, from_fp32: TraceDifference, rounding: TraceDifference) -> str:
    """A line if a run's gradients are nearer to fp32 than its precision allows; else empty."""
    least = tolerances.LEAST_ROUNDING * rounding.gradient[0]
    if recipe.precision == Fp32() or from_fp32.gradient[0] >= least:
        return ""
    return (
        f"gradients differ from fp32 by only {from_fp32.gradient[0]:.1e}, and those of {recipe.precision.kind} by "
        f"{rounding.gradient[0]:.1e}: the recipe computes in another precision"
    )


def content_key(recipe: Recipe) -> str:
    """A key that is equal for recipes that train alike: everything except names and folders."""
    values = to_mapping(recipe)
    for name in ("name", "sweep", "runs", "notes", "launch", "tracker", "world"):
        values.pop(name)
    return json.dumps(values, sort_keys=True, default=str)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a rehearsal has ended."""

    run: str
    layout: str
    state: str  # `ok` or `failed`
    outcome: str  # how the run ended: `done`, `crash`, `oom`, …; `infeasible` if it was not started
    cause: str = ""
    processes: int = 0
    seconds: float = 0.0
    log: str | None = None  # log of the rank that failed, with the traceback
    same_as: str | None = None  # an earlier run with the same reduced recipe, so that this one was not trained again
    missing: tuple[str, ...] = ()


def rehearse(
    cases: Sequence[Reduced], train: Callable[[Recipe], Ended], log_of: Callable[[Ended], str]
) -> Iterator[Result]:
    """Train each reduced recipe, equal ones only once; yield how each ended, in the order of `cases`."""
    known: dict[str, Result] = {}
    for case in cases:
        named: dict[str, Any] = {"run": case.run, "layout": case.layout, "missing": case.missing}
        if case.recipe is None:
            yield Result(**named, state=FAILED, outcome=OutcomeKind.INFEASIBLE.value, cause=str(case.error))
            continue
        key = content_key(case.recipe)
        if key in known:
            yield replace(known[key], **named, same_as=known[key].run, seconds=0.0)
            continue
        ended = train(case.recipe)
        kind = ended.outcome.kind
        done = kind is OutcomeKind.DONE
        known[key] = Result(
            **named,
            processes=case.recipe.layout.world,
            state=OK if done else FAILED,
            outcome=kind.value,
            cause="" if done else ended.outcome.cause or kind.meaning,
            seconds=ended.seconds,
            log=None if done else log_of(ended),
        )
        yield known[key]


PARITY_SCHEMA = 1
PARITY_FILE = "parity.json"
_LOCK = ".parity.lock"
_PATIENCE_SECONDS = 10.0
_CURE = "remove that file, and prove the sweep again"


@dataclass(frozen=True, kw_only=True)
class ParityFile:
    """The content of a sweep's parity.json."""

    rows: tuple[ProofRow, ...]
    time: str = ""
    reference: str = ""


def read_parity(sweep: Path) -> ParityFile | None:
    """A sweep's parity.json; None: it was never proved. ConfigError: the file is damaged, or of another version."""
    return read_typed(sweep / PARITY_FILE, ParityFile, schema=PARITY_SCHEMA, cure=_CURE)


def write_parity(sweep: Path, rows: Sequence[ProofRow], *, reference: str) -> Path:
    """Write rows into a sweep's parity.json; the rows of runs that were not proved again stay. Returns the file.

    Raises:
        ConfigError: an earlier file is damaged, another process writes it for too long, or the folder is read-only.
        OSError: the file cannot be written.
    """
    sweep.mkdir(parents=True, exist_ok=True)
    # Two commands may prove parts of one sweep at the same time.
    with claimed(sweep, "sweep", patience_seconds=_PATIENCE_SECONDS, file=_LOCK):
        earlier, now = read_parity(sweep), {row.run for row in rows}
        kept = [row for row in earlier.rows if row.run not in now] if earlier is not None else []
        made = ParityFile(rows=(*kept, *rows), time=time.strftime("%Y-%m-%dT%H:%M:%S%z"), reference=reference)
        write_typed(sweep / PARITY_FILE, made, schema=PARITY_SCHEMA)
    return sweep / PARITY_FILE
