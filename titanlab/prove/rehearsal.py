"""Rehearsals: every recipe of a sweep trains a few steps on a CPU, in a small size and its real layout, folded.

They find what would break on the cluster. Failures do not stop the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titanlab.prove.proof import content_key
from titanlab.prove.reduction import Reduced
from titanlab.recipe.recipe import Recipe
from titanlab.records.outcome import OutcomeKind

if TYPE_CHECKING:
    from titanlab.prove.forked import Ended

OK = "ok"
FAILED = "failed"
STEPS = 3


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


def rehearse(
    cases: Sequence[Reduced], train: Callable[[Recipe], Ended], log_of: Callable[[Ended], str]
) -> Iterator[Result]:
    """Train each reduced recipe once, and say how each rehearsal ended, in their order."""
    known: dict[str, Result] = {}
    for case in cases:
        named = Result(
            run=case.run,
            layout=case.layout,
            state=FAILED,
            outcome=OutcomeKind.INFEASIBLE.value,
            cause="" if case.error is None else str(case.error),
            missing=case.missing,
        )
        if case.recipe is None:
            yield named
            continue
        key = content_key(case.recipe)
        if key in known:
            first = known[key]
            yield replace(
                first, run=named.run, layout=named.layout, missing=named.missing, same_as=first.run, seconds=0.0
            )
            continue
        ended = train(case.recipe)
        kind = ended.outcome.kind
        done = kind is OutcomeKind.DONE
        known[key] = replace(
            named,
            processes=case.recipe.layout.world,
            state=OK if done else FAILED,
            outcome=kind.value,
            cause="" if done else ended.outcome.cause or kind.meaning,
            seconds=ended.seconds,
            log=None if done else log_of(ended),
        )
        yield known[key]
