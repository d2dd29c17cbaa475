"""The profiler of a run, from its start to its end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from titanlab.distributed.mesh import Mesh
from titanlab.distributed.traffic import axis_groups, marked
from titanlab.distributed.world import World
from titanlab.profiler.consumers import named_before_steps, named_consumers
from titanlab.profiler.contract import Links, Profiler
from titanlab.recipe.recipe import Recipe
from titanlab.records.outcome import first_line
from titanlab.records.run_folder import RunFolder
from titanlab.system.disk import disk_fault
from titanlab.training.recording.recorder import Recorder

__all__ = ["named_before_steps", "named_consumers", "profiled", "profiler_of"]


def profiler_of(recipe: Recipe) -> Profiler:
    """The recipe's profiler, which has not been started."""
    return recipe.profiler.implementation()


@contextlib.contextmanager
def profiled(
    profiler: Profiler, run: RunFolder, world: World, mesh: Mesh, recorder: Recorder, *, attempt: int
) -> Iterator[None]:
    """Start this rank's profiler, and close it at the end."""

    def failed(what: str, reason: Exception | str) -> None:
        if isinstance(reason, Exception):
            reason = disk_fault(reason, ends_run=False) or first_line(reason)
        text = f"{what} is not written: {reason}; training goes on"
        recorder.warn(text)
        if not world.logs:
            # The recorder of this rank does nothing; its standard error is its log.
            sys.stderr.write(f"warning: {text}\n")

    axes = axis_groups(mesh)
    profiler.connect(
        Links(
            axes=axes,
            marks_collectives=lambda: marked(axes) if world.world > 1 else contextlib.nullcontext(),
            gather=world.gather,
            report=recorder.measured,
            failed=failed,
        )
    )
    profiler.start(run.traces, rank=world.rank, attempt=attempt, on_gpu=world.device.type == "cuda")
    try:
        yield
    finally:
        profiler.close()
