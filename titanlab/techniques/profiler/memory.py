"""Peak of memory by phase of the step, snapshots of a GPU's allocator, and what the memory holds at out-of-memory."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titanlab.costs import BLOCKS
from titanlab.system import trimmed
from titanlab.techniques.profiler.contract import Profiler
from titanlab.techniques.profiler.held import consumers, resident_bytes
from titanlab.techniques.profiler.profilers_schema import Memory
from titanlab.techniques.profiler.trace import OTHER, PHASES, write_whole

RANK = "memory_by_phase/rank"
_SAMPLE_SECONDS = 0.002
# Phases in which each layer's memory is recorded.
_PASSES = ("forward", "backward")


class MemoryProfiler(Profiler):
    """Samples memory in windows of steps, by phase and by layer: resident on a CPU, allocated on a GPU."""

    def __init__(self, config: Memory) -> None:
        self._config = config
        self._steps = self._last = 0
        self._sampler: _Sampler | None = None
        self._records = False

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        self._records = on_gpu
        self._used = resident_bytes
        self._traces, self._attempt, self._rank = traces, attempt, rank
        if on_gpu:
            device = torch.cuda.current_device()
            self._used = lambda: torch.cuda.memory_allocated(device)
            # This function is private, but torch documents it as the way to record the allocator's history.
            torch.cuda.memory._record_memory_history(max_entries=self._config.entries, stacks="python")
            # Private, and only in GPU builds. It calls back before the exception frees what Python's frames hold.
            attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
            if attach is not None:
                attach(self._at_out_of_memory)

    def phase(self, name: str) -> AbstractContextManager[None]:
        if self._sampler is None or name not in PHASES:
            return contextlib.nullcontext()
        return self._sampler.phase(name)

    def after_step(self, step: int) -> None:
        self._steps += 1
        if self._sampler is not None and step == self._last:
            rows = self.links.gather(self._sampler.close())
            self._sampler, row = None, largest(rows)
            peaks = ", ".join(f"{name} {row[metric(name)]:.3g} GiB" for name in PHASES if row[metric(name)])
            text = f"memory up to step {step}, largest of the ranks: {peaks}; most on rank {int(row[RANK])}"
            layers = self._by_layer(rows, step)
            self.links.report("memory", step, row, [text, *layers])
            if self._records:
                self._write_snapshot(f"step-{step}")
        if self._config.begins_after(self._steps):
            self._last = step + self._config.steps
            self._sampler = _Sampler(self._used, layers_of(self.links.model))

    def _by_layer(self, rows: Sequence[dict[str, float]], step: int) -> list[str]:
        """Write a table of each layer's peaks, the largest of all ranks; return a line with the largest layers."""
        peaks: dict[str, float] = {}
        for name, peak in (item for row in rows for item in row.items() if item[0] not in PHASES):
            peaks[name] = max(peaks.get(name, 0.0), peak)
        if not peaks:
            return []
        if self._rank == 0:
            table = ["layer,forward_gib,backward_gib"]
            for layer in dict.fromkeys(name.rpartition(" ")[0] for name in peaks):
                own = [peaks.get(f"{layer} {each}") for each in _PASSES]
                # A frozen layer may have no backward.
                table.append(",".join([layer, *("" if peak is None else f"{peak:.6f}" for peak in own)]))
            path = self._traces / f"attempt-{self._attempt}-step-{step}.layers.csv"
            write_whole(path, lambda aside: aside.write_text("\n".join(table) + "\n"), self.links.failed)
        largest_first = sorted(peaks, key=lambda name: -peaks[name])
        shown = ", ".join(f"{name} {peaks[name]:.3g} GiB" for name in largest_first[:3])
        return [f"memory by layer up to step {step}, most in: {shown}"]

    def close(self) -> None:
        """Stop sampling and recording; a window that is open is not reported."""
        if self._sampler is not None:
            self._sampler.close()
        if self._records:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write_snapshot(self, moment: str) -> None:
        """Write the allocator's history into a file; titanlab itself never reads these files: they are pickles."""
        path = self._traces / f"attempt-{self._attempt}-{moment}-rank-{self._rank}.snapshot.pickle"
        write_whole(path, lambda aside: torch.cuda.memory._dump_snapshot(str(aside)), self.links.failed)

    def _at_out_of_memory(self, *_: int) -> None:
        # Report the run's own error, not that of a full disk.
        with contextlib.suppress(OSError, RuntimeError):
            self._write_snapshot("out-of-memory")


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model, and its other children, by their paths."""
    layers: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        is_list = name == BLOCKS
        layers |= {f"{name}.{key}": block for key, block in child.named_children()} if is_list else {name: child}
    return layers


class _Sampler:
    """Peaks of memory by phase, and by layer and pass: sampled by a thread, and at each change of phase or layer.

    A layer's backward begins with the gradient of its output. It ends when the next layer's begins, or with the phase.
    """

    def __init__(self, used: Callable[[], int], layers: Mapping[str, nn.Module]) -> None:
        self._used, self._phase, self._layer = used, OTHER, ""
        self._peaks = dict.fromkeys(PHASES, 0.0)
        self._ends = threading.Event()
        self._hooks = []
        for name, layer in layers.items():
            # FSDP2's gathers count as part of the layer: FSDP2's hook that frees them runs after this hook.
            self._hooks.append(layer.register_forward_pre_hook(functools.partial(self._enter, name), prepend=True))
            self._hooks.append(layer.register_forward_hook(functools.partial(self._end, name), prepend=True))
        self._note()
        self._thread = threading.Thread(target=self._sample, name="memory profiler", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = self._phase
        self._enter("")
        self._phase = name
        self._note()
        try:
            yield
        finally:
            self._enter("")
            self._phase = outer

    def _enter(self, layer: str, *_: Any) -> None:
        self._note()
        self._layer = layer
        self._note()

    def _end(self, layer: str, _: nn.Module, __: Any, output: Any) -> None:
        # In the backward phase, this forward was a recomputation: the backward of the same layer goes on.
        if self._phase != "backward":
            self._enter("")
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(functools.partial(self._enter, layer))

    def close(self) -> dict[str, float]:
        """Stop, and return the peaks in GiB: by phase (0 if it was not entered), then by layer and pass."""
        self._ends.set()
        self._thread.join()
        for hook in self._hooks:
            hook.remove()
        return dict(self._peaks)

    def _sample(self) -> None:
        while not self._ends.wait(_SAMPLE_SECONDS):
            self._note()

    def _note(self) -> None:
        phase, layer, used = self._phase, self._layer, self._used() / 2**30
        self._peaks[phase] = max(self._peaks[phase], used)
        if layer and phase in _PASSES:
            name = f"{layer} {phase}"
            self._peaks[name] = max(self._peaks.get(name, 0.0), used)


def metric(phase: str) -> str:
    """The name of a phase's peak in rows of metrics."""
    return f"memory_by_phase/{phase}(GiB)"


def largest(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics: the largest peak of all ranks by phase, and the rank with the largest peak of all."""
    rank = max(range(len(rows)), key=lambda number: max(rows[number].values()))
    return {**{metric(name): max(row[name] for row in rows) for name in PHASES}, RANK: rank}


_CUDA_ALLOCATED = re.compile(r"([\d.]+) ([KMG])iB is allocated by PyTorch")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@contextlib.contextmanager
def named_consumers() -> Iterator[None]:
    """If the block raises an out-of-memory error, put what the memory holds, the largest first, into its message.

    torch's own message follows.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
            map(str(error).__contains__, _OUT_OF_MEMORY)
        ):
            error.args = (_described(error),)
        raise


def _described(error: BaseException) -> str:
    """A line with what this rank's memory holds and the module whose forward raised the error; then its message."""
    names: dict[int, str] = {}
    module, trace = "", error.__traceback__
    while trace is not None:
        caller = trace.tb_frame.f_locals.get("self")
        if isinstance(caller, nn.Module):
            # The first module on the stack is the model.
            names = names or {id(each): name for name, each in caller.named_modules()}
            module = names.get(id(caller), module)
        trace = trace.tb_next
    message = str(error)
    line = message.splitlines()[0] if message else "out of memory"
    # Keep only the start of CUDA's message: from `GPU 0 …` on come numbers and a paragraph of advice.
    head = re.split(r"\.? GPU \d|\. Error code", line)[0].rstrip(". ")
    match = _CUDA_ALLOCATED.search(message)
    whole = float(match[1]) * _UNITS[match[2]] if match else resident_bytes()
    sizes = consumers()
    sizes["activations and the rest"] = max(0, int(whole) - sum(sizes.values()))
    parts = sorted(((size, name) for name, size in sizes.items() if size), reverse=True)
    held = ", ".join(f"{name} {_size(size)}" for size, name in parts)
    return f"{head}; this rank holds: {held}{f'; in the forward of {module}' if module else ''}\n{message}"


def _size(count: int) -> str:
    return f"{trimmed(count / 2**30)} GiB" if count >= 2**30 else f"{trimmed(count / 2**20)} MiB"
