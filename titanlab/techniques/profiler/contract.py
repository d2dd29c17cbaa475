"""The contract of a profiler: its config, and the object that a rank calls after each step. Torch-free."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from titanlab.costs import OptionConfig

if TYPE_CHECKING:
    from torch import nn


class ProfilerConfig(OptionConfig, Protocol):
    """A config of the group `profiler`: a dataclass that inherits from this class.

    Attributes:
        uses_torch_profiler: whether the profiler runs torch.profiler, which only one profiler of a process may do.
    """

    kind: str
    uses_torch_profiler: ClassVar[bool] = False

    @abstractmethod
    def implementation(self) -> Profiler:
        """A profiler that has not been started."""


Phase = Callable[[str], AbstractContextManager[None]]


def nothing(name: str) -> AbstractContextManager[None]:
    """The `phase` of a run without a profiler: it records nothing."""
    return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class Links:
    """The parts of a run that its profiler may use.

    Attributes:
        axes: name of a process group → axis of the layout.
        marks_collectives: gives a context manager that puts annotations `titanlab.issue:AXIS:KIND` before collectives.
        gather: returns the values of all ranks for a value of this rank; every rank calls it.
        report: takes the kind of a row of metrics, the step, the metrics, and lines for the log; rank 0 writes them.
        failed: takes the name of what could not be written, such as a file, and the reason; writes one line into this
            rank's log.
        model: the module with this rank's part of the model.
    """

    axes: Mapping[str, str]
    marks_collectives: Callable[[], AbstractContextManager[None]]
    gather: Callable[[dict[str, float]], list[dict[str, float]]]
    report: Callable[[str, int, Mapping[str, float], Sequence[str]], None]
    failed: Callable[[str, Exception | str], None]
    model: nn.Module


class Profiler(Protocol):
    """Profiles one rank. A profiler must not change what the run computes, nor end it: see `Links.failed`.

    By default it does nothing.
    """

    links: Links

    def connect(self, links: Links) -> None:
        """Called once, before `start`."""
        self.links = links

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        """Called once, before the first step."""
        return

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context manager for a phase of the step in the main thread: `data`, `forward`, `backward`, `optimizer`,
        `checkpoint`, or `exposed_pipeline`. In `exposed_pipeline` the rank waits for another pipeline stage; this phase
        may be nested in another phase.
        """  # fmt: skip
        return nothing(name)

    def after_step(self, step: int) -> None:
        """Called by every rank after each step."""
        return  # the default; mypy takes an empty body for an abstract method

    def close(self) -> None:
        """Called once, also after an error."""
        return


class NoProfiler(Profiler):
    """The profiler of a run without profiling: it does nothing."""


class SeveralProfilers(Profiler):
    """Passes every call on to each profiler."""

    def __init__(self, profilers: Sequence[Profiler]) -> None:
        self._profilers = profilers

    def connect(self, links: Links) -> None:
        for profiler in self._profilers:
            profiler.connect(links)

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        for profiler in self._profilers:
            profiler.start(traces, rank=rank, attempt=attempt, on_gpu=on_gpu)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for profiler in self._profilers:
                stack.enter_context(profiler.phase(name))
            yield

    def after_step(self, step: int) -> None:
        for profiler in self._profilers:
            profiler.after_step(step)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for profiler in self._profilers:
                stack.callback(profiler.close)
