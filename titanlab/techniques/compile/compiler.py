"""Compiles a model's blocks, one graph each, and its loss; watches torch's compilations."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _symmetric_memory as symmetric_memory

from titanlab.errors import ConfigError
from titanlab.techniques.compile.contract import F
from titanlab.techniques.compile.schema import Compile

# Warnings of inductor, at each compilation for a GPU, that a user cannot act on: float32 must stay float32, so that
# layouts can be compared, and inductor itself chooses how to compute a softmax.
_ADVICE = ("TensorFloat32 tensor cores for float32", r"\s*Online softmax is disabled on the fly")


class TorchCompiler:
    """Compiles with `torch.compile`.

    It compiles a block's `forward`, not the module: parameter names do not change, and FSDP's hooks, which would break
    the graph, run outside of it.
    """

    def __init__(self, config: Compile) -> None:
        self._config = config

    def compile_blocks(
        self,
        blocks: Iterable[nn.Module],
        *,
        async_group: dist.ProcessGroup | None = None,
        memory_budget: float | None = None,
    ) -> None:
        if not self._config.blocks:
            return
        options: dict[str, Any] = {}
        if async_group is not None:
            enable_async_tensor(async_group)
            options = ASYNC_OPTIONS
        for block in blocks:
            block.forward = _compiled(block.forward, self._config, options, memory_budget)

    def compile_loss(self, function: F) -> F:
        if not self._config.loss:
            return function
        compiled: F = _compiled(function, self._config, {}, None)
        return compiled


def _compiled(function: Any, config: Compile, options: dict[str, Any], memory_budget: float | None) -> Any:
    import torch._dynamo

    put_states_before_objects()
    for advice in _ADVICE:
        warnings.filterwarnings("ignore", message=advice, category=UserWarning)
    # Forget the compilations for an earlier model of this process: torch would try them first, and count them against
    # its limit of compilations of a function.
    torch._dynamo.reset_code(getattr(function, "__func__", function).__code__)
    # With this optimisation, torch under DDP splits a block's graph where DDP's buckets end, although the buckets are
    # made for the full model. It also refuses checkpointed blocks.
    torch._dynamo.config.optimize_ddp = False
    # The router's counts become variables of the graph. Without this setting, reading a count breaks the graph.
    torch._dynamo.config.capture_scalar_outputs = True
    backend: Any = config.backend
    if config.backend == "inductor" and config.mode != "default":
        from torch._inductor import list_mode_options

        options = {**list_mode_options(config.mode), **options}
    if memory_budget is not None:
        backend, options = Budgeted(config.backend, tuple(options.items()), memory_budget), {}
    # Every microbatch has the same shape, so torch need not write a slower graph for all shapes.
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options or None)


ASYNC_KEY = "parallelism.async_tensor"
# A private option of inductor; torch 2.11 to 2.13 have no public one.
ASYNC_OPTIONS = {"_micro_pipeline_tp": True}
_CALL = re.compile(r"= torch\.ops\.symm_mem\.fused_\w+")


def enable_async_tensor(group: dist.ProcessGroup) -> None:
    """Enable symmetric memory for a group; without it, inductor does not fuse the group's collectives.

    torch calls the function deprecated and unnecessary, but inductor's pass
    (`torch/_inductor/fx_passes/micro_pipeline_tp.py`) needs it in 2.11 to 2.13. Delete this when the pass no longer
    needs it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`enable_symm_mem_for_group` is deprecated", category=FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group.group_name)


class FusionCheck:
    """Checks that inductor fuses products in the blocks that this process compiles from now on.

    It reads the generated code, because inductor's pass does not run for code from torch's cache.
    """

    def __init__(self) -> None:
        self._before = set(map(id, _generated()))

    def check_fused(self, gather: Callable[[int], list[int]]) -> None:
        """Raise ConfigError on every rank if a rank fused no product. All ranks call this after the first step.

        `gather` takes this rank's number of calls of fused operators and returns those of all ranks.
        """
        files = [module.__file__ for module in _generated() if id(module) not in self._before]
        counts = gather(sum(len(_CALL.findall(Path(file).read_text())) for file in files if file))
        without = [str(rank) for rank, count in enumerate(counts) if count == 0]
        if without:
            named = ", ".join(without[:4]) + (", …" if len(without) > 4 else "")
            where = "every rank" if len(without) == len(counts) else f"rank{'s' if len(without) > 1 else ''} {named}"
            rule = f"inductor has fused no product with its collective on {where}"
            raise ConfigError(ASYNC_KEY, True, rule, "try false, or an empty folder as TORCHINDUCTOR_CACHE_DIR")


def _generated() -> list[ModuleType]:
    from torch._inductor.codecache import PyCodeCache

    return list(PyCodeCache.modules)


_PATCHED = "titanlab_puts_states_first"


def put_states_before_objects() -> None:
    """Patch torch's partitioner to return generator states first, as its runtime expects. Later calls do nothing.

    A recomputation needs the generator's state of the forward pass; torch treats attention as random even without
    dropout. On a CPU torch 2.13 returns this state after objects that are not tensors, such as the mesh of DTensor
    parameters, and then saves such an object as if it were a tensor ("expected all tensors_saved_with_vc_check to be
    Tensors"), so that tensor parallelism with checkpointing fails. No upstream issue is known. Delete this when
    tests/ac/test_parity.py passes without it.
    """
    from torch._functorch import partitioners

    # torch 2.11 saves no such objects and lacks this function.
    is_object = getattr(partitioners, "is_opaque_node", None)
    original = partitioners.functionalize_rng_ops
    if is_object is None or hasattr(original, _PATCHED):
        return

    @functools.wraps(original)
    def functionalize(joint: Any, forward: Any, backward: Any, sizes: int) -> Any:
        objects = sum(map(is_object, forward.graph.output_node().all_input_nodes))
        # The last outputs are objects, then sizes. torch uses the number of sizes only to find where to insert states.
        forward, backward = original(joint, forward, backward, sizes + objects)
        inputs = list(backward.graph.find_nodes(op="placeholder"))
        first = next((node for node in inputs if is_object(node)), None)
        if first is not None:
            for node in inputs:
                if node.name.startswith("rng_state_output"):
                    first.prepend(node)
            backward.recompile()
        return forward, backward

    setattr(functionalize, _PATCHED, True)
    partitioners.functionalize_rng_ops = functionalize  # type: ignore[assignment]


class GraphMemory:
    """Marks where microbatches begin, and copies results that outlive them; without CUDA graphs it does nothing.

    torch keeps the results of CUDA graphs only until the next step begins. Without these marks it takes the end of one
    block's backward for the end of a step, and frees tensors that the backwards of other blocks still need.

    Args:
        records: whether parts of the model are recorded as CUDA graphs.
    """

    def __init__(self, *, records: bool) -> None:
        self._records = records

    def begin(self) -> None:
        """Called before each microbatch's forward: from here on torch may overwrite results of earlier microbatches."""
        if self._records:
            torch.compiler.cudagraph_mark_step_begin()

    def kept(self, result: torch.Tensor) -> torch.Tensor:
        """The result, or a copy of it, that may be used after its microbatch."""
        return result.clone() if self._records else result

    def keep_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the gradients of the first of several microbatches: later microbatches add theirs to the copies."""
        if self._records:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()


@dataclass(frozen=True)
class Budgeted:
    """A compiler backend that keeps at most a share of a graph's activations and recomputes the others.

    torch's budget is a setting of the process; here it applies only while this graph is split into forward and
    backward. torch compares backends to reuse compilations, so instances with the same budget must compare equal.

    Attributes:
        budget: 1 keeps all activations, 0 only the inputs.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    budget: float

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        # `lookup_backend` is private in torch 2.11 to 2.13. It also finds the backends of other packages.
        from torch._dynamo import lookup_backend
        from torch._functorch import config as functorch_config

        patches = {"config_patches": dict(self.options)} if self.options else {}
        # The mesh of tensor parallelism is an input of the graph; torch 2.13 cannot compute its size, which is zero.
        known = hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size")
        objects: dict[str, Any] = {"unsafe_treat_script_objects_as_zero_size": True} if known else {}
        with functorch_config.patch(activation_memory_budget=self.budget, **objects):
            return lookup_backend(self.name)(graph, inputs, **patches)


# Packages that may compile a function several times in a first step: an optimizer's update for each parameter's shape.
_OWN = {"torch", "torchao"}

SECONDS = "compile/seconds"
RECOMPILATIONS = "compile/recompilations"


class Watch:
    """Reports the compilations that torch has recorded since this object was made.

    The first compilation of a function is expected, and so is one more when it is first called without gradients, as in
    validation. Any other compilation is a surprise: it costs seconds, and may happen in every step.

    Args:
        active: give metrics even before the first compilation.
        note: called with a line about expected compilations.
        warn: called with a line about the first surprise.
    """

    def __init__(
        self,
        *,
        active: bool = False,
        note: Callable[[str], None] = lambda line: None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._active, self._note, self._warn = active, note, warn
        # The functions that were compiled: (file, first line, whether in a validation).
        self._known: set[tuple[str, int, bool]] = set()
        self._last: Any = None
        self._seconds, self._surprises = 0.0, 0
        self._new()

    def after_step(self, step: int, *, first: bool) -> float:
        """Report the compilations of a step, and return their seconds; `first`: the first step of the process."""
        return self._report(step, first=first)

    def after_validation(self, step: int) -> None:
        self._report(step, evaluating=True)

    def metrics(self) -> dict[str, float | int]:
        """Totals so far, by the names of metrics; empty if nothing is compiled."""
        return {SECONDS: self._seconds, RECOMPILATIONS: self._surprises} if self._active else {}

    def _report(self, step: int, *, first: bool = False, evaluating: bool = False) -> float:
        records = self._new()
        seconds = _union((record.start_time_us, record.end_time_us) for record in records) / 1e6
        self._seconds += seconds
        names: dict[str, None] = {}
        for record in records:
            if not record.co_name:
                continue
            path, line = Path(str(record.co_filename)), int(record.co_firstlineno or 0)
            name, place = f"{record.co_name} ({path.name}:{line})", (str(path), line, evaluating)
            names[name] = None
            is_surprise = place in self._known and not (first and _OWN.intersection(path.parts))
            self._known.add(place)
            if is_surprise and not self._surprises:
                reason = _short(record.recompile_reason or "") or "no reason given"
                counted = f"further ones are counted as {RECOMPILATIONS}"
                self._warn(f"step {step}: {name} was compiled again: {reason}; {counted}")
            self._surprises += is_surprise
        self._active = self._active or bool(names)
        if first and names:
            self._note(f"compiled in {seconds:.1f} s, which no step counts: {', '.join(names)}")
        return seconds

    def _new(self) -> list[Any]:
        """Torch's records of compilations since the last call; none until torch's compiler is imported."""
        if "torch._dynamo.utils" not in sys.modules:
            return []
        from torch._dynamo import utils

        # torch keeps 64 records by default; a first step may have more.
        utils.set_compilation_metrics_limit(4096)
        records = list(utils.get_compilation_metrics())
        known = next((place for place, record in enumerate(records, 1) if record is self._last), 0)
        self._last = records[-1] if records else self._last
        return records[known:]


def _union(spans: Iterable[tuple[int | None, int | None]]) -> int:
    """Total length of spans, overlaps counted once: a backward may be compiled within a forward's span."""
    total, end = 0, 0
    for start, stop in sorted((start, stop) for start, stop in spans if start is not None and stop is not None):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _short(reason: str) -> str:
    """The first line of torch's reason, without its prefix: the number of the earlier compilation that did not fit."""
    line = reason.strip().partition("\n")[0]
    number, colon, rest = line.partition(": ")
    return (rest if colon and "/" in number else line).strip()
