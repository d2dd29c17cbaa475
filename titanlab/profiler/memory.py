"""Peak of memory by phase of the step, and on GPUs snapshots of the allocator."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from titanlab.profiler.contract import Links, Profiler
from titanlab.profiler.files import write_whole
from titanlab.profiler.memory_schema import Memory
from titanlab.profiler.step_parts import OTHER, PHASES

RANK = "memory_by_phase/rank"
_SAMPLE_SECONDS = 0.002


class MemoryProfiler(Profiler):
    """Samples memory in windows of steps: resident memory on CPU, what the allocator has given out on a GPU."""

    def __init__(self, config: Memory) -> None:
        self._config = config
        self._steps = self._last = 0
        self._sampler: _Sampler | None = None
        self._snapshots: _Snapshots | None = None

    def connect(self, links: Links) -> None:
        """Remember what the run offers."""
        self._links = links

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        """Begin to record allocations on a GPU."""
        self._used = resident_bytes
        if on_gpu:
            device = torch.cuda.current_device()
            self._used = lambda: torch.cuda.memory_allocated(device)
            self._snapshots = _Snapshots(
                traces, f"attempt-{attempt}", f"rank-{rank}", entries=self._config.entries, failed=self._links.failed
            )

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count memory for a phase, in the steps that are sampled."""
        if self._sampler is None or name not in PHASES:
            return contextlib.nullcontext()
        return self._sampler.phase(name)

    def after_step(self, step: int) -> None:
        """Start a window, or end it, if it is time to."""
        config = self._config
        self._steps += 1
        place = self._steps - config.skip
        if self._sampler is not None and step == self._last:
            self._report(step, self._sampler)
        if place == 0 or (config.every and place > 0 and place % config.every == 0):
            self._last = step + config.steps
            self._sampler = _Sampler(self._used)

    def close(self) -> None:
        """Stop sampling and recording; a window that is open is not reported."""
        if self._sampler is not None:
            self._sampler.close()
        if self._snapshots is not None:
            self._snapshots.close()

    def _report(self, step: int, sampler: _Sampler) -> None:
        self._sampler = None
        row = largest(self._links.gather(sampler.close()))
        peaks = ", ".join(f"{name} {row[metric(name)]:.3g} GiB" for name in PHASES if row[metric(name)])
        text = f"memory up to step {step}, largest of the ranks: {peaks}; most on rank {int(row[RANK])}"
        self._links.report("memory", step, row, [text])
        if self._snapshots is not None:
            self._snapshots.write(f"step-{step}")


class _Sampler:
    """Peaks by phase, sampled by a thread and where phases change.

    Args:
        used: the bytes in use now.
    """

    def __init__(self, used: Callable[[], int]) -> None:
        self._used, self._phase = used, OTHER
        self._peaks = dict.fromkeys(PHASES, 0.0)
        self._ends = threading.Event()
        self._note()
        self._thread = threading.Thread(target=self._sample, name="memory profiler", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = self._phase
        self._note()
        self._phase = name
        self._note()
        try:
            yield
        finally:
            self._note()
            self._phase = outer

    def close(self) -> dict[str, float]:
        """The peaks in GiB, by phase; 0 for a phase that was not entered."""
        self._ends.set()
        self._thread.join()
        return dict(self._peaks)

    def _sample(self) -> None:
        while not self._ends.wait(_SAMPLE_SECONDS):
            self._note()

    def _note(self) -> None:
        phase = self._phase
        self._peaks[phase] = max(self._peaks[phase], self._used() / 2**30)


class _Snapshots:
    """Files of the allocator's history; titanlab writes them and reads none, because they are pickles."""

    def __init__(
        self, folder: Path, begin: str, end: str, *, entries: int, failed: Callable[[str, Exception], None]
    ) -> None:
        self._folder, self._begin, self._end, self._failed = folder, begin, end, failed
        # Private, but torch's documented way to record the allocator's history.
        torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python")
        # Private: calls back before the exception frees what the frames hold. Only builds for GPUs have it.
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(self._at_out_of_memory)

    def write(self, moment: str) -> None:
        """Write the allocations of now, and the latest ones before."""
        path = self._folder / f"{self._begin}-{moment}-{self._end}.snapshot.pickle"
        write_whole(path, lambda aside: torch.cuda.memory._dump_snapshot(str(aside)), self._failed)

    def close(self) -> None:
        """Stop recording."""
        torch.cuda.memory._record_memory_history(enabled=None)

    def _at_out_of_memory(self, device: int, allocated: int, on_device: int, free: int) -> None:
        # The run's own error is to be reported, not a full disk.
        with contextlib.suppress(OSError, RuntimeError):
            self.write("out-of-memory")


def metric(phase: str) -> str:
    """The name of a phase's peak in rows of metrics."""
    return f"memory_by_phase/{phase}(GiB)"


def largest(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest of the ranks' peaks by phase as metrics, and the rank that has the largest of all."""
    rank = max(range(len(rows)), key=lambda number: max(rows[number].values()))
    return {**{metric(name): max(row[name] for row in rows) for name in PHASES}, RANK: rank}


def resident_bytes() -> int:
    """Resident memory of this process; where the system does not tell, its peak so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return pages * os.sysconf("SC_PAGE_SIZE")
