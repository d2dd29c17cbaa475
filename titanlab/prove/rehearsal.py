"""Rehearsals: every recipe of a sweep trains a few steps on a CPU, in a small size and its real layout, folded.

They find what would break on the cluster. Failures do not stop the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titanlab.errors import ConfigError
from titanlab.prove.proof import Candidate, content_key
from titanlab.prove.reduction import Reduced, common_sizes, fold_label, fold_recipe, missing_axes, reduce_recipe
from titanlab.recipe.recipe import Recipe
from titanlab.records.outcome import OutcomeKind

if TYPE_CHECKING:
    from titanlab.prove.forked import Ended

OK = "ok"
FAILED = "failed"
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """One layout in which a recipe is rehearsed.

    Attributes:
        layout: the folded layout and the real one, as text.
        reduced: None: the recipe breaks a rule, or cannot be reduced.
        cause: of that.
        missing: axes that did not fit, which the recipe's next rehearsal has.
    """

    run: str
    layout: str
    reduced: Reduced | None
    cause: str = ""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a rehearsal.

    Attributes:
        state: `ok` or `failed`.
        outcome: how the run ended: `done`, `crash`, `oom`, …; `infeasible` if it was not started.
        cause: of a failure, in one line.
        log: the log of the rank that failed; it has the traceback.
        same_as: an earlier run whose reduced recipe is the same, so that this one was not trained again.
    """

    run: str
    layout: str
    state: str
    outcome: str
    cause: str = ""
    processes: int = 0
    seconds: float = 0.0
    log: str | None = None
    same_as: str | None = None
    missing: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def plan_rehearsals(
    candidates: Sequence[Candidate], *, steps: int, runs: str, most: int, inductor: bool = False
) -> list[Rehearsal]:
    """Fold and reduce every recipe; one that does not fit in one layout gets several rehearsals.

    Args:
        steps: of each rehearsal.
        runs: folder of the reduced runs.
        most: processes of one rehearsal.
        inductor: keep inductor, which writes and compiles kernels.
    """
    rehearsals = []
    for candidate in candidates:
        real = candidate.recipe.layout
        try:
            for folded in fold_recipe(candidate.run, candidate.recipe, most=most, inductor=inductor):
                label = fold_label(folded.layout, real)
                reduced = reduce_recipe(folded, common_sizes([folded]), steps=steps, runs=runs, saves=True)
                missing = tuple(missing_axes(folded.layout, real))
                rehearsals.append(Rehearsal(run=candidate.run, layout=label, reduced=reduced, missing=missing))
        except ConfigError as error:
            rehearsals.append(Rehearsal(run=candidate.run, layout=real.label, reduced=None, cause=str(error)))
    return rehearsals


def rehearse(
    rehearsals: Sequence[Rehearsal], train: Callable[[Recipe], Ended], log_of: Callable[[Ended], str]
) -> Iterator[Result]:
    """Train each reduced recipe once, and say how each rehearsal ended, in their order."""
    known: dict[str, Result] = {}
    for rehearsal in rehearsals:
        named = Result(
            run=rehearsal.run,
            layout=rehearsal.layout,
            state=FAILED,
            outcome=OutcomeKind.INFEASIBLE.value,
            cause=rehearsal.cause,
            missing=rehearsal.missing,
        )
        if rehearsal.reduced is None:
            yield named
            continue
        recipe = rehearsal.reduced.recipe
        key = content_key(recipe)
        if key in known:
            first = known[key]
            yield replace(
                first, run=named.run, layout=named.layout, missing=named.missing, same_as=first.run, seconds=0.0
            )
            continue
        known[key] = _ended(replace(named, processes=recipe.layout.world), train(recipe), log_of)
        yield known[key]


def _ended(named: Result, ended: Ended, log_of: Callable[[Ended], str]) -> Result:
    kind = ended.outcome.kind
    done = kind is OutcomeKind.DONE
    return replace(
        named,
        state=OK if done else FAILED,
        outcome=kind.value,
        cause="" if done else ended.outcome.cause or kind.meaning,
        seconds=ended.seconds,
        log=None if done else log_of(ended),
    )
