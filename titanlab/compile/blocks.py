"""Regional compilation: a model's blocks, one graph each, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from titanlab.compile import async_tensor
from titanlab.compile.generator_state import put_states_before_objects
from titanlab.compile.schema import Compile

F = TypeVar("F", bound=Callable[..., Any])


def compile_blocks(
    blocks: Iterable[nn.Module],
    config: Compile,
    *,
    async_group: dist.ProcessGroup | None = None,
    memory_budget: float | None = None,
) -> None:
    """Compile the forward pass of each block, in place, if the config asks for it.

    The method is compiled and not the module: names stay, and the hooks by which FSDP gathers parameters run
    outside of the graph, which would break at them.

    Args:
        async_group: AsyncTP: inductor puts products and the collectives of this group beside them into one operator
            of symmetric memory, which works on one piece while another is on its way.
        memory_budget: share of a block's activations that is kept between forward and backward; None: what the
            backend finds best.
    """
    if not config.blocks:
        return
    options = inductor_options(config)
    if async_group is not None:
        async_tensor.register(async_group)
        options |= async_tensor.OPTIONS
    for block in blocks:
        block.forward = _compiled(block.forward, config, options, memory_budget)


def compile_function(function: F, config: Compile) -> F:
    """A loss, or a part of one, compiled if the config asks for it."""
    if not config.loss:
        return function
    compiled: F = _compiled(function, config, inductor_options(config), None)
    return compiled


def inductor_options(config: Compile) -> dict[str, Any]:
    """The mode as single settings, beside which there is room for others; empty for other backends."""
    if config.backend != "inductor" or config.mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(config.mode))


def _compiled(function: Any, config: Compile, options: dict[str, Any], memory_budget: float | None) -> Any:
    import torch._dynamo

    put_states_before_objects()
    # What an earlier model of the process has left in the function's cache would be asked first at every call, and
    # counts against the few versions of a function that torch allows.
    torch._dynamo.reset_code(getattr(function, "__func__", function).__code__)
    # Otherwise a block under DDP is cut into several graphs where DDP's buckets end, which are those of the whole
    # model; and checkpointed ones are refused.
    torch._dynamo.config.optimize_ddp = False
    backend: Any = config.backend
    if memory_budget is not None:
        from titanlab.compile.backend import Budgeted

        backend, options = Budgeted(config.backend, tuple(options.items()), memory_budget), {}
    # Every microbatch has the same shape. Told so, torch never writes a slower graph for any shape.
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options or None)
