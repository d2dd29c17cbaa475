"""Trains reduced (small) recipes on this host: this process imports torch once, and forks the ranks of each recipe.

The import of torch and the trainer takes seconds, a fork takes milliseconds. Each rank is a new process, so what an
earlier recipe has left in memory (compiled code, process groups) cannot affect the next recipe.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titanlab.distributed import ATTEMPT, MEETING, Ranks, free_port
from titanlab.errors import TitanlabError
from titanlab.launch import (
    RankProcesses,
    conclude,
    fork_children,
    import_techniques,
    import_trainer,
    memory_kills,
    wait_for,
)
from titanlab.recipe import Recipe, to_mapping
from titanlab.records import Outcome, RunFolder, create_run, identify

if TYPE_CHECKING:
    from titanlab.train import Observer

Observe = Callable[[Recipe, RunFolder, Ranks], "Observer"]

# `prepare` sets these before it imports torch. One thread: with more, sums are rounded in another order.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# Variables that the ranks must not inherit, if this process was itself started as a rank.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *MEETING)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run of a reduced recipe has ended."""

    run: RunFolder
    attempt: int
    outcome: Outcome
    seconds: float  # from the fork of its ranks to the end of the last rank


class RunFailed(TitanlabError):
    """A reduced run has not done all of its steps."""

    def __init__(self, ended: Ended) -> None:
        self.ended = ended
        cause = ended.outcome.cause or ended.outcome.kind.meaning
        super().__init__(f"{ended.outcome.kind.value}: {cause}; log: {log_of(ended)}")


def prepare() -> None:
    """Import torch and the trainer, which takes seconds."""
    for name in _FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(_ENVIRONMENT)
    import_trainer()
    importlib.import_module("titanlab.parallelism.pipeline")
    gc.collect()
    # Exempt all objects from garbage collection: in a rank it would write to shared pages, and so copy them.
    gc.freeze()


def train_in_ranks(recipe: Recipe, observe: Observe | None = None) -> Ended:
    """Train a resolved recipe on this host, in its folder of runs; `prepare` must have been called.

    Args:
        observe: makes the observer of a rank, in the rank's process.
    """
    data = recipe.data.implementation().fingerprint()
    identity = identify(recipe, data=data, hardware="cpu")
    config = to_mapping(recipe)
    run = create_run(recipe.runs, sweep=recipe.sweep, name=recipe.name, identity=identity, config=config)
    attempt = run.begin_attempt(config, {})
    import_techniques(recipe)
    world = recipe.layout.world
    first = Ranks(
        rank=0,
        world=world,
        local_rank=0,
        local_world=world,
        address="127.0.0.1",
        port=free_port(),
        started_by=recipe.launch.kind,
    )

    def act() -> int:
        os.environ[ATTEMPT] = str(attempt)
        from titanlab.launch import main, show_stacks

        show_stacks()
        return main([str(run.path)], observe=observe)

    begin = time.time()
    kills = memory_kills()
    started = RankProcesses(fork_children(first, run.logs, act))
    try:
        failed = wait_for(started, run, since=begin)
    except BaseException:
        # Leave no rank behind, also after Ctrl-C.
        started.end(signal.SIGKILL, seconds=1.0)
        raise
    outcome = run.result(attempt)
    if outcome is None:
        outcome = conclude(run, attempt, failed, memory=kills.evidence())
    return Ended(run=run, attempt=attempt, outcome=outcome, seconds=time.time() - begin)


def log_of(ended: Ended) -> Path:
    """The log of the rank that failed, with its traceback."""
    return ended.run.logs / f"rank-{ended.outcome.rank or 0}.log"
