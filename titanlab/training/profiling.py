"""The profiler of a run, from its start to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from titanlab.distributed.world import World
from titanlab.profiler.contract import Profiler
from titanlab.recipe.recipe import Recipe
from titanlab.records.run_folder import RunFolder


@contextlib.contextmanager
def profiled(recipe: Recipe, run: RunFolder, world: World, *, attempt: int) -> Iterator[Profiler]:
    """Start this rank's profiler, and close it at the end."""
    profiler: Profiler = recipe.profiler.implementation()
    profiler.start(run.traces, rank=world.rank, attempt=attempt, on_gpu=world.device.type == "cuda")
    try:
        yield profiler
    finally:
        profiler.close()
