"""Regional compilation: a model's blocks, one graph each, and the loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from titanlab.compile import async_tensor
from titanlab.compile.contract import F
from titanlab.compile.generator_state import put_states_before_objects
from titanlab.compile.schema import Compile


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
