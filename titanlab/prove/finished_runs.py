"""Two finished runs: did they log the same losses and gradient norms at equal tokens? Torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.prove.proof import ProofRow
from titanlab.prove.reduction import check_same, comparable
from titanlab.prove.tolerances import of_runs
from titanlab.recipe import Recipe, check_unedited, from_mapping
from titanlab.records import TRAIN, OutcomeKind, RunFolder

NOT_COMPARED = "gradients and parameters were not compared: runs do not log them"


@dataclass(frozen=True, kw_only=True)
class Logged:
    """A finished run, and what it has logged."""

    run: RunFolder
    recipe: Recipe
    # Tokens seen at a logged step → (loss, gradient norm) of the step; None: not finite.
    rows: dict[int, tuple[float | None, float | None]]
    ended_as_nan: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that must be equal for two runs to be compared."""
        identity = self.run.identity()
        content: Mapping[str, Any] = {} if identity is None else identity.content
        return {
            **comparable(self.recipe),
            "training.steps": self.recipe.training.steps,
            "fingerprint of the data": content.get("data"),
            "starting weights": content.get("weights"),
        }


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """How the second of two runs differs from the first."""

    row: ProofRow
    compared: int  # steps at equal tokens
    logged: int  # steps that either run has logged
    tokens: int  # number of tokens at which the losses differ most
    first: tuple[float, float]  # relative differences of loss and gradient norm in the first compared step


def compare_runs(first: RunFolder, second: RunFolder) -> RunComparison:
    """Compare the logs of two runs. ConfigError: a run has not finished, or the recipes do not train the same."""
    if first.path.resolve() == second.path.resolve():
        raise ConfigError("run", second.path.name, "is both runs", "name two runs, or a recipe for a proof")
    a, b = _read(first), _read(second)
    # Both recipes must train the same model on the same tokens in the same order.
    check_same(first.path.name, a.facts, b.facts, "compare runs that differ in layout or technique only")
    tokens = sorted(a.rows.keys() & b.rows.keys())
    if not tokens:
        rule = f"has no logged step in common with {first.path.name}: none is at the same number of tokens"
        raise ConfigError("run", second.path.name, rule, "log the same steps: training.log_every")
    losses, norms = ([_relative(a.rows[at][place], b.rows[at][place]) for at in tokens] for place in (0, 1))
    limits = max((of_runs(logged.recipe.precision) for logged in (a, b)), key=lambda limit: limit.loss)
    parts = [f"{logged.run.path.name} ended as nan: {logged.ended_as_nan}" for logged in (a, b) if logged.ended_as_nan]
    bounds = [
        ("the first logged loss", losses[0], limits.first_step),
        ("the first logged grad norm", norms[0], limits.first_step),
        ("a loss", max(losses), limits.loss),
        ("the median grad norm", statistics.median(norms), limits.grad_norm),
    ]
    for name, number, limit in bounds:
        if not math.isfinite(number):
            parts.append(f"{name} is not finite")
        elif number > limit:
            parts.append(f"{name} differs by {number:.1e}, more than {limit:.0e}")
    row = ProofRow(
        run=second.path.name,
        layout=f"{b.recipe.layout.label} against {a.recipe.layout.label}",
        precision=b.recipe.precision.kind,
        passed=not parts,
        reason="; ".join(parts),
        loss=max(losses),
        grad_norm=statistics.median(norms),
        tolerance=limits._asdict(),
    )
    return RunComparison(
        row=row,
        compared=len(tokens),
        logged=len(a.rows.keys() | b.rows.keys()),
        tokens=tokens[losses.index(max(losses))],
        first=(losses[0], norms[0]),
    )


def _read(run: RunFolder) -> Logged:
    name = run.path.name
    check_unedited(run)
    outcome = run.result()
    if outcome is None:
        state = run.known_status()
        rule = "has not finished" + (f": {state.state}, step {state.step} of {state.steps}" if state else "")
        raise ConfigError("run", name, rule, "wait for it: titanlab status")
    if outcome.kind not in (OutcomeKind.DONE, OutcomeKind.NAN):
        rule = f"ended as {outcome.kind.value} at step {outcome.step} of {outcome.steps}"
        rule += f": {outcome.cause}" if outcome.cause else ""
        raise ConfigError("run", name, rule, "compare runs that have done all of their steps")
    rows = {}
    for row in run.metrics(TRAIN):
        tokens, loss, norm = (row.get(key) for key in (meter.TOKENS_SEEN, meter.LOSS, meter.GRAD_NORM))
        if type(tokens) is int:
            rows[tokens] = (_number(loss), _number(norm))
    if not rows:
        raise ConfigError("run", name, "has no logged step in metrics.jsonl", "compare another run, or train it again")
    ended_as_nan = outcome.cause or "its loss was not finite" if outcome.kind is OutcomeKind.NAN else ""
    return Logged(run=run, recipe=from_mapping(run.config()), rows=rows, ended_as_nan=ended_as_nan)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _relative(first: float | None, second: float | None) -> float:
    """The relative difference; infinite if one of the numbers is not finite."""
    if first is None or second is None:
        return math.inf
    return abs(first - second) / max(abs(first), 1e-30)
