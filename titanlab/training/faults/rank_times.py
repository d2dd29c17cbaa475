"""What each rank's time and memory went to: the slowest rank with its phase, and the largest memory, as metrics.

Every rank measures two phases of its steps. `data` is the time in which it waits for its batch. `compute` is the time
in which its threads compute in forward and backward, or wait for a core; on a GPU, which computes
itself, the time that the host takes. Waiting for other ranks is in neither, so a rank that others wait for stands out.
Ranks of one pipeline stage are compared with each other: those of another stage have other layers.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from titanlab.costs.meter import MEMORY_MOST, MEMORY_MOST_RANK
from titanlab.distributed.world import World
from titanlab.terminal.numerals import trimmed
from titanlab.training.memory import peak_memory_gib

SLOWEST, SLOWER, DATA, COMPUTE = "straggler/rank", "straggler/slower(%)", "straggler/data(s)", "straggler/compute(s)"
# A rank is reported if it takes this much longer than the median rank, this share of the time of the steps, and so many
# seconds: less than that, in a few short steps, is what else runs on the host.
_RATIO, _SHARE, _SECONDS = 1.5, 0.1, 0.25
_PHASES = ("data", "forward and backward")
_COMPUTE = 1


class RankTimes:
    """Measures this rank, and compares the ranks every few steps.

    Args:
        every: steps between two comparisons; 0: only one, after the last step.
        pipeline: degree of the pipeline, whose ranks lie farthest apart.
        report: on rank 0, gets the metrics and a warning, which is empty if no rank is slow.
    """

    def __init__(
        self, every: int, world: World, *, pipeline: int, report: Callable[[Mapping[str, float], str], None]
    ) -> None:
        self._every, self._world, self._report = every, world, report
        # A rank that is alone with its layers is compared with those that have others.
        self._alone = pipeline == world.world
        self._peers = world.world if self._alone else world.world // pipeline
        self._is_cpu = world.device.type == "cpu"
        self._steps, self._begin = 0, time.monotonic()
        self._data = self._compute = 0.0
        self._warned: set[tuple[int, int]] = set()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Inside the block, the rank waits for its batch."""
        begin = time.monotonic()
        yield
        self._data += time.monotonic() - begin

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Inside the block, the rank runs forward and backward."""
        if self._world.world == 1:
            # There is nobody to compare with, and reading the clocks is 5 % of a step of a tiny model.
            yield
            return
        begin = self._clock()
        yield
        self._compute += self._clock() - begin

    def after_step(self, step: int, *, last: bool) -> None:
        """Compare the ranks if it is time to; all ranks call it."""
        self._steps += 1
        if self._steps == 1:
            # Compilation and the first collectives say nothing about later steps.
            self._restart()
        elif self._world.world > 1 and (last or (self._every and step % self._every == 0)):
            self._compare(step)
            self._restart()

    def _compare(self, step: int) -> None:
        own = [self._data, self._compute, peak_memory_gib(self._world.device), time.monotonic() - self._begin]
        table = torch.zeros(self._world.world, len(own), dtype=torch.float64)
        table[self._world.rank] = torch.tensor(own, dtype=torch.float64)
        rows = self._world.sum(table).tolist()
        if self._world.logs:
            steps = max(1, self._steps - 1)
            metrics, slow = compared(rows, steps, peers=self._peers)
            # One warning for a rank and phase; the metric goes on telling.
            is_new = slow is not None and slow not in self._warned
            if slow is not None:
                self._warned.add(slow)
            self._report(metrics, self._warning(step, metrics, slow[1]) if slow is not None and is_new else "")

    def _warning(self, step: int, metrics: Mapping[str, float], phase: int) -> str:
        text = (
            f"step {step}: rank {int(metrics[SLOWEST])} is slow in {_PHASES[phase]}: a step takes it "
            f"{trimmed(metrics[DATA])} s for data and {trimmed(metrics[COMPUTE])} s of computing, "
            f"{metrics[SLOWER]:.0f}% more than the others"
        )
        return f"{text}, which have other layers (parallelism.split)" if self._alone and phase == _COMPUTE else text

    def _restart(self) -> None:
        self._steps, self._begin, self._data, self._compute = 1, time.monotonic(), 0.0, 0.0

    def _clock(self) -> float:
        if not self._is_cpu:
            return time.monotonic()
        # Threads of the process compute; waiting in a collective takes no CPU time.
        return time.process_time() + _queued_seconds()


def compared(rows: list[list[float]], steps: int, *, peers: int) -> tuple[dict[str, float], tuple[int, int] | None]:
    """Metrics, and the rank and phase that are slow; None: no rank is.

    Args:
        rows: by rank: seconds of data and of compute, GiB of memory, seconds in all.
        peers: how many neighbouring ranks are compared with each other.
    """
    busy = [data + compute for data, compute, *_ in rows]
    groups = [range(first, first + peers) for first in range(0, len(rows), peers)]
    # By rank: the median of its peers.
    usual = [
        statistics.median([busy[peer] for peer in group if peer != rank] or [busy[rank]])
        for group in groups
        for rank in group
    ]
    slowest = max(range(len(rows)), key=lambda rank: busy[rank] - usual[rank])
    median = max(usual[slowest], 1e-9)
    memory = max(range(len(rows)), key=lambda rank: rows[rank][2])
    metrics = {
        SLOWEST: slowest,
        SLOWER: 100 * (busy[slowest] / median - 1),
        DATA: rows[slowest][0] / steps,
        COMPUTE: rows[slowest][1] / steps,
        MEMORY_MOST: rows[memory][2],
        MEMORY_MOST_RANK: memory,
    }
    excess = busy[slowest] - median
    if not (busy[slowest] > _RATIO * median and excess > max(_SHARE * rows[slowest][3], _SECONDS)):
        return metrics, None
    group = groups[slowest // peers]
    by_phase = [
        rows[slowest][phase] - statistics.median(rows[peer][phase] for peer in group) for phase in range(len(_PHASES))
    ]
    return metrics, (slowest, by_phase.index(max(by_phase)))


def _queued_seconds() -> float:
    """How long the main thread has waited for a core; 0 where the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0
