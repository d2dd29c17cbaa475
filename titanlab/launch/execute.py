"""From a composed recipe to a finished run: check everything, then start the ranks.

This module does not import torch: an error in a recipe is reported within a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titanlab.checkpoint import Place, parent_of, put_back
from titanlab.data import source
from titanlab.distributed import Ranks, check_host, held_signals, stopped_before_start, this_host
from titanlab.launch import processes
from titanlab.launch.attempt import (
    Group,
    close_earlier,
    conclude,
    go_back,
    keep_tokenizer,
    missed_checkpoint,
    with_progress,
)
from titanlab.launch.contract import Failure, launch_of
from titanlab.launch.evidence import memory_kills
from titanlab.launch.launchers import joined
from titanlab.recipe import (
    Recipe,
    check,
    check_host_memory,
    check_unedited,
    from_mapping,
    resolve,
    shortened_warmup,
    to_mapping,
)
from titanlab.records import (
    Identity,
    KillEvidence,
    Outcome,
    OutcomeKind,
    RunFolder,
    check_runs,
    create_run,
    from_exit,
    identify,
)
from titanlab.system import Console, counted, disk_fault, shown_path, tells_of_disk
from titanlab.train import check_beginning, not_read, start_fingerprint

if TYPE_CHECKING:
    from titanlab.launch.job import Job


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A recipe that has passed every check, with prepared data and a name."""

    recipe: Recipe
    identity: Identity
    ranks: Ranks | None


def prepare(
    recipes: Sequence[Recipe],
    report: Callable[[str], None],
    *,
    started: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> list[Ready]:
    """Resolve and check recipes, and prepare their data; no run folder is created and nothing starts.

    Args:
        started: the runs resume from their own checkpoints; the weights from which they first started may be gone.
    """
    host, ranks = this_host(), joined(environ)
    resolved = []
    # All quick checks of all recipes come before the data of any recipe is prepared.
    for given in recipes:
        recipe = resolve(given, world=ranks.world if ranks else None, accelerator=host.accelerator, device=host.device)
        check(recipe)
        processes = ranks.local_world if ranks else recipe.layout.world
        check_host(
            host,
            accelerator=recipe.cluster.accelerator,
            device=recipe.cluster.device,
            processes=processes,
            has_own_gpu=ranks is not None and ranks.has_own_gpu,
        )
        check_host_memory(recipe, host, processes=processes)
        check_runs(recipe.runs)
        if not started:
            check_beginning(recipe)
        resolved.append(recipe)
    if ranks is None or ranks.rank == 0:
        notices = list(map(shortened_warmup, recipes))
        for recipe in () if started else recipes:
            notices += not_read(recipe)
        for notice in dict.fromkeys(filter(None, notices)):
            report(notice)
    ready = []
    for recipe in resolved:
        source.prepare(recipe.data, report=report)
        # Some rules need the corpus itself: its length, or the vocabulary of its tokenizer.
        check(recipe)
        identity = identify(
            recipe,
            data=source.fingerprint(recipe.data),
            hardware=str(recipe.cluster.device),
            repeat=recipe.repeat,
            # A run that has begun has a name already.
            weights=None if started else start_fingerprint(recipe),
        )
        ready.append(Ready(recipe=recipe, identity=identity, ranks=ranks))
    return ready


def execute(ready: Ready, console: Console) -> Outcome:
    """Create or open the run's folder, start the ranks, wait for them, and make sure that the outcome is recorded.

    A finished run is not changed; a stopped run resumes from its latest checkpoint.
    """
    recipe = ready.recipe
    run = create_run(
        recipe.runs,
        sweep=recipe.sweep,
        name=recipe.name,
        identity=ready.identity,
        config=to_mapping(recipe),
        parent=parent_of(recipe.checkpoint.load_from),
    )
    return continue_run(run, recipe, ready.ranks, console)


def continue_run(
    run: RunFolder,
    recipe: Recipe,
    ranks: Ranks | None,
    console: Console,
    *,
    checkpoint: Place | None = None,
) -> Outcome:
    """Begin the next attempt at a run with the given recipe, from its latest checkpoint if there is one.

    Args:
        checkpoint: an older checkpoint of the run to resume from instead; later ones are renamed.
    """
    done = run.result()
    if done is not None and done.kind is OutcomeKind.DONE:
        console.note(
            f"{run.path} is done: {counted(done.steps or 0, 'step')}. For another like it: repeat={recipe.repeat + 1}"
        )
        return done
    if ranks is not None and ranks.rank > 0:
        # Only rank 0 writes records.
        with held_signals():
            failures = processes.start_one(run.path, ranks, config=to_mapping(recipe))
        return from_exit(failures[0].exit_code, rank=ranks.rank) if failures else Outcome(kind=OutcomeKind.DONE)
    with run.claim():
        close_earlier(run)
        run.withdraw_cancel()
        put_aside: list[Place] = []
        if checkpoint is not None:
            put_aside = go_back(run, recipe, checkpoint, console.note)
        started_by = ranks.started_by if ranks else launch_of(recipe).kind
        here = RanksHere(run, recipe, ranks, console, started_by=started_by, checkpoint=checkpoint, put_aside=put_aside)
        return here.make_attempts()


class RanksHere(Group):
    """The ranks of a run that this process starts: all of them, or the one as which torchrun or srun started it.

    Args:
        recipe: prepared; None: the job's, which is prepared first.
        put_aside: the checkpoints after the chosen one, which were renamed.
        job: the job of this process, if it runs all ranks: a check that prevents its attempt then gives a result.
    """

    def __init__(
        self,
        run: RunFolder,
        recipe: Recipe | None,
        ranks: Ranks | None,
        console: Console,
        *,
        started_by: str,
        checkpoint: Place | None = None,
        put_aside: Sequence[Place] = (),
        job: Job | None = None,
    ) -> None:
        processes = ranks.local_world if ranks else None
        super().__init__(run, console.warn, started_by=started_by, processes=processes, job=job, checkpoint=checkpoint)
        self._recipe, self._ranks, self._console, self._put_aside = recipe, ranks, console, put_aside
        self._held: list[tuple[int, float]] = []

    def next_recipe(self) -> Recipe:
        if self.restart is not None:
            return self.restart.recipe
        if self.checkpoint is None and (missed := missed_checkpoint(self.run)):
            self._console.note(missed)
        if self._recipe is None:
            assert self.job is not None
            self.job.check_code()
            check_unedited(self.run)
            # A scheduler may have started the process that submitted, not this one.
            recipe = from_mapping(self.job.config())
            self._recipe = prepare([recipe], self._console.note, started=True, environ={})[0].recipe
        return self._recipe

    def refused(self, error: Exception) -> Outcome:
        if self.job is None:
            raise error
        return self.job.refused(error, self.job.config())

    def attempted(self, attempt: int, recipe: Recipe) -> Outcome:
        run, console, ranks, job = self.run, self._console, self._ranks, self.job
        # The attempt gets its result before a signal ends this process: torchrun sends SIGTERM to rank 0 while it
        # records why another rank has failed.
        with held_signals() as self._held:
            if job is not None:
                self._held += job.signals
            start = launch_of(recipe).implementation().start if ranks is None else None
            keep_tokenizer(run, recipe)
            kills = memory_kills()
            # From here on, rank 0 writes to the terminal.
            console.phase(None)
            if self._held:
                outcome = with_progress(run, stopped_before_start(self._held[0][0], attempt=attempt))
                run.write_result(outcome)
                console.note(f"{outcome.kind.value}: {outcome.cause}")
            else:
                if start is not None:
                    failures = start(run.path, attempt=attempt, world=recipe.layout.world, logs=run.logs)
                else:
                    assert ranks is not None
                    failures = processes.start_one(run.path, ranks)
                shown = set(range(ranks.world)) if ranks is not None else {0} if job is None else set()
                outcome = _recorded(run, attempt, failures, console, terminal=shown, memory=kills.evidence())
            if outcome.kind is OutcomeKind.CANCELLED and (by := run.asked_to_cancel()) is not None:
                # The cause begins with the signal that asked the ranks to stop: name the user instead.
                outcome = replace(outcome, cause=f"{by}; {(outcome.cause or '').partition('; ')[2]}")
                run.write_result(outcome)
            if self._put_aside and not any(row["attempt"] == attempt for row in run.metrics("attempt")):
                # The chosen checkpoint cannot be loaded: the later ones count again.
                put_back(self._put_aside)
        return outcome

    def goes_on_after(self, outcome: Outcome, recipe: Recipe) -> bool:
        # torchrun has its own restarts; a signal means that somebody wants the run to end.
        if self._held or self._ranks is not None or self.decided(outcome, recipe) is not None:
            return False
        assert self.restart is not None
        if self.restart.left_out is not None and recipe.cluster.accelerator == "cuda":
            processes.hide_device(self.restart.left_out)
        self.checkpoint, self._put_aside = None, ()
        return True


def _recorded(
    run: RunFolder,
    attempt: int,
    failures: list[Failure],
    console: Console,
    *,
    terminal: Collection[int],
    memory: KillEvidence | None,
) -> Outcome:
    """The outcome of the attempt; written here if no rank lived long enough to write it.

    Args:
        terminal: ranks whose output is on the terminal already.
    """
    recorded = run.result(attempt)
    if recorded is not None:
        return recorded
    try:
        outcome = conclude(run, attempt, {failure.rank: failure.exit_code for failure in failures}, memory=memory)
    except OSError as error:
        fault = disk_fault(error)
        if fault is None:
            raise
        outcome = Outcome(kind=OutcomeKind.CRASH, attempt=attempt, cause=fault)
        console.error(f"the run has ended, and {shown_path(run.path)} cannot take a result.json: {fault}")
        return outcome
    if outcome.traceback and outcome.rank not in terminal and not tells_of_disk(outcome.cause):
        console.note(outcome.traceback.rstrip())
    if outcome.kind is OutcomeKind.INFEASIBLE:
        # As before the start: one line with the key, the value, the rule and the cure.
        console.error(outcome.cause or outcome.kind.meaning)
        return outcome
    console.end(
        f"{outcome.kind.value}: {outcome.kind.meaning}",
        [
            ("cause", outcome.cause or ""),
            ("rank", "" if outcome.rank is None else outcome.rank),
            ("step", outcome.step),
            ("folder", shown_path(run.path)),
        ],
        tone="bad",
        next_steps=[f"titanlab diagnose {shown_path(run.path)}"] if outcome.kind is OutcomeKind.HANG else [],
    )
    return outcome
