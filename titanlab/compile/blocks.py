"""Regional compilation: a model's blocks, one graph each, and the loss."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from titanlab.compile import async_tensor
from titanlab.compile.contract import F
from titanlab.compile.generator_state import put_states_before_objects
from titanlab.compile.schema import Compile

# What inductor advises on a GPU, at each compilation, and what nobody can follow here: float32 stays float32, so that
# layouts can be compared, and how inductor computes a softmax is its own choice.
_ADVICE = ("TensorFloat32 tensor cores for float32", r"\s*Online softmax is disabled on the fly")


class TorchCompiler:
    """Compiles with `torch.compile`.

    It compiles a block's `forward`, not the module: so parameter names do not change, and FSDP's hooks run outside of
    the graph, which they would break.
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
        """See `Compiler`."""
        if not self._config.blocks:
            return
        options = inductor_options(self._config)
        if async_group is not None:
            async_tensor.register(async_group)
            options |= async_tensor.OPTIONS
        for block in blocks:
            block.forward = _compiled(block.forward, self._config, options, memory_budget)

    def compile_loss(self, function: F) -> F:
        """See `Compiler`."""
        if not self._config.loss:
            return function
        compiled: F = _compiled(function, self._config, inductor_options(self._config), None)
        return compiled


def inductor_options(config: Compile) -> dict[str, Any]:
    """The inductor options of the mode, to which others can be added; empty for other backends."""
    if config.backend != "inductor" or config.mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(config.mode))


def _compiled(function: Any, config: Compile, options: dict[str, Any], memory_budget: float | None) -> Any:
    import torch._dynamo

    put_states_before_objects()
    for advice in _ADVICE:
        warnings.filterwarnings("ignore", message=advice, category=UserWarning)
    # Otherwise torch would try the compilations for an earlier model of this process first, and count them against its
    # limit of compilations of a function.
    torch._dynamo.reset_code(getattr(function, "__func__", function).__code__)
    # Otherwise torch splits a block's graph under DDP at the ends of DDP's buckets, which are made for the full model,
    # and refuses checkpointed blocks.
    torch._dynamo.config.optimize_ddp = False
    # The router's counts become variables of the graph; otherwise reading one would break it.
    torch._dynamo.config.capture_scalar_outputs = True
    backend: Any = config.backend
    if memory_budget is not None:
        from titanlab.compile.backend import Budgeted

        backend, options = Budgeted(config.backend, tuple(options.items()), memory_budget), {}
    # Every microbatch has the same shape, so torch need not write a slower graph for all shapes.
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options or None)
