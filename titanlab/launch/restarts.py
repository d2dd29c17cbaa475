"""Restarts in place: after a rank has died, the group starts again from the newest checkpoint, perhaps on fewer ranks.

The rules (docs/elastic.md states them for users): at most `launch.restarts` times, and not after an end that the same
attempt would only repeat. With `launch.min_world`, a rank that fails twice in a row is left out, and ranks of a job
that are lost with their node are left out at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from titanlab.checkpoint import checkpoints_of, latest, step_of
from titanlab.distributed import this_host
from titanlab.errors import ConfigError
from titanlab.recipe import LaunchSettings, Recipe, adapted, check_all_but_data, resolve
from titanlab.records import RESTART, Outcome, OutcomeKind, RunFolder
from titanlab.system import tells_of_disk, write_json

# Ends of single processes or machines: another attempt may not have them.
_RESTARTED = (OutcomeKind.CRASH, OutcomeKind.HANG, OutcomeKind.OOM, OutcomeKind.NODE_FAIL)
# After this many restarts in a row that gain nothing, the run itself is the cause.
MOST_IN_VAIN = 2


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The next attempt of a group that starts again.

    Attributes:
        recipe: resolved and checked; its layout may be smaller.
        why: one line: how the last attempt ended, and what happens now.
        left_out: the rank of the last attempt that is left out because it has failed twice; None: no rank is.
        lost: why ranks are left out as lost, in one clause; empty: no rank is lost.
    """

    recipe: Recipe
    number: int
    why: str
    cause: str | None
    left_out: int | None = None
    lost: str = ""


class Restarts:
    """Decides, after each attempt of one start of a run, whether the group starts again.

    Args:
        fixed: ranks that cannot be left out.
    """

    def __init__(self, run: RunFolder, launch: LaunchSettings, *, fixed: Collection[int] = ()) -> None:
        self._run, self._fixed = run, tuple(fixed)
        self._most, self._min_world = launch.restarts, launch.min_world
        self._count = self._in_vain = 0
        self._best = (run.saved_step(), 0)
        self._failed: int | None = None
        self._in_a_row = 0
        # The first attempt does not count as in vain, even if it gained nothing.
        self._is_first = True

    def after(
        self, outcome: Outcome, recipe: Recipe, *, lost: str = "", usable: int | None = None
    ) -> tuple[Restart | None, str]:
        """The next attempt after one that ended; None, and why, if there is none.

        Args:
            lost: which ranks are lost and why, in one clause; empty: no rank is lost.
            usable: number of processes that are left, including those that the attempt did not use; None: the processes
                of the attempt.
        """
        if not self._most or outcome.kind not in _RESTARTED or tells_of_disk(outcome.cause):
            return None, ""
        if outcome.exit_code == OutcomeKind.INFEASIBLE.exit_code:
            return None, ""
        gained = self._gained(outcome)
        self._in_vain = 0 if gained else self._in_vain + 1
        self._in_a_row = self._in_a_row + 1 if outcome.rank is not None and outcome.rank == self._failed else 1
        self._failed = outcome.rank
        if self._count >= self._most:
            return None, f"not restarted: launch.restarts={self._most} are used up"
        allowed = 1 if outcome.kind is OutcomeKind.OOM else MOST_IN_VAIN
        if self._in_vain >= allowed:
            times = "1 restart has" if allowed == 1 else f"{allowed} restarts in a row have"
            return None, f"not restarted: {times} reached no further step and saved no checkpoint"
        self._count += 1
        usable = recipe.layout.world if usable is None else usable
        if lost:
            return self._without_lost(outcome, recipe, lost, usable)
        return self._next(outcome, recipe, usable), ""

    def _gained(self, outcome: Outcome) -> bool:
        """Whether the attempt has saved a new checkpoint or taken a step that no earlier attempt had reached."""
        reached = (self._run.saved_step(), outcome.step)
        gained = self._is_first or reached[0] > self._best[0] or reached[1] > self._best[1]
        self._best, self._is_first = (max(reached[0], self._best[0]), max(reached[1], self._best[1])), False
        return gained

    def _without_lost(self, outcome: Outcome, recipe: Recipe, lost: str, usable: int) -> tuple[Restart | None, str]:
        """The next attempt without the lost ranks; None, and why, if no layout fits the remaining ranks."""
        smaller = recipe if usable >= recipe.layout.world else self._smaller(recipe, usable)
        if smaller is None:
            return None, f"not restarted: {lost}, and {self._too_few()}"
        self._failed, self._in_a_row = None, 0
        why = f"{self._line(outcome)}; {lost}, and left out: "
        why += (
            f"other processes of the job take their places in {recipe.layout.label}"
            if smaller is recipe
            else change(recipe, smaller)
        )
        return Restart(recipe=smaller, number=self._count, why=why, cause=outcome.cause, lost=lost), ""

    def _next(self, outcome: Outcome, recipe: Recipe, usable: int) -> Restart:
        why, left_out, smaller = self._line(outcome), None, None
        if self._min_world is not None and self._in_a_row >= 2:
            left_out = self._failed
            if left_out in self._fixed:
                why += f"; rank {left_out} has failed twice, and is the one that cannot be left out"
            elif usable > recipe.layout.world:
                smaller = recipe
                why += f"; rank {left_out} has failed twice and is left out: another process of the job takes its place"
            elif (smaller := self._smaller(recipe, usable - 1)) is None:
                why += f"; rank {left_out} has failed twice, and {self._too_few()}"
            else:
                why += f"; rank {left_out} has failed twice and is left out: {change(recipe, smaller)}"
            if smaller is not None:
                self._failed, self._in_a_row = None, 0
        return Restart(
            recipe=smaller or recipe,
            number=self._count,
            why=why,
            cause=outcome.cause,
            left_out=left_out if smaller is not None else None,
        )

    def _line(self, outcome: Outcome) -> str:
        checkpoint = latest(checkpoints_of(self._run))
        place = "the beginning" if checkpoint is None else f"step {step_of(checkpoint)}"
        rank = "" if outcome.rank is None else f", rank {outcome.rank}"
        return (
            f"attempt {outcome.attempt} ended as {outcome.kind.value} after step {outcome.step}{rank}"
            f" ({outcome.cause or outcome.kind.meaning}); restart {self._count} of {self._most} from {place}"
        )

    def _smaller(self, recipe: Recipe, usable: int) -> Recipe | None:
        return None if self._min_world is None else reduced(recipe, usable, self._min_world)

    def _too_few(self) -> str:
        return f"no smaller layout of at least launch.min_world={self._min_world} processes fits"


def change(recipe: Recipe, smaller: Recipe) -> str:
    """The rule by which a smaller layout was chosen, with both layouts, in one clause."""
    return (
        f"{recipe.layout.label} becomes {smaller.layout.label}, the most data-parallel processes that are left and "
        f"divide training.global_batch={recipe.training.global_batch}, in microbatches of {smaller.microbatch}"
    )


def hide_device(restart: Restart, recipe: Recipe) -> None:
    """Hide the device of the rank that was left out from the processes that this process starts from now on."""
    if restart.left_out is None or recipe.cluster.accelerator != "cuda":
        return
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    visible = visible or [str(number) for number in range(this_host().count)]
    del visible[restart.left_out : restart.left_out + 1]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)


def note(run: RunFolder, attempt: int, restart: Restart, after: int) -> None:
    """Record in an attempt's folder that it is a restart, and why."""
    write_json(
        run.attempt_folder(attempt) / RESTART,
        {
            "schema": 1,
            "number": restart.number,
            "after_attempt": after,
            "cause": restart.cause,
            "why": restart.why,
            "left_out": restart.left_out,
            "lost": restart.lost or None,
            "world": restart.recipe.layout.world,
        },
    )


def reduced(recipe: Recipe, usable: int, least: int) -> Recipe | None:
    """The resolved recipe with the largest data-parallel degree that fits the usable processes; None if none does.

    Pipeline, context and tensor degrees stay. Of layouts with the same degree, one that shards as before comes first.
    """
    layout = recipe.layout
    others = layout.world // layout.data
    pairs = [
        (replicate, shard)
        for replicate in range(1, layout.replicate + 1)
        for shard in range(1, layout.shard + 1)
        if least <= replicate * shard * others <= usable and recipe.training.global_batch % (replicate * shard) == 0
    ]
    for replicate, shard in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]), reverse=True):
        degrees = {**layout.degrees(), "replicate": replicate, "shard": shard}
        smaller = replace(recipe, world=None, parallelism=recipe.parallelism.with_degrees(degrees))
        try:
            smaller, _ = adapted(smaller, recipe)
            cluster: Any = recipe.cluster
            smaller = resolve(smaller, world=None, accelerator=cluster.accelerator, device=cluster.device)
            check_all_but_data(smaller)
        except ConfigError:
            continue
        return smaller
    return None
