"""Regional compilation: a model's blocks, one graph each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from titanlab.compile.schema import Compile


def compile_blocks(blocks: Iterable[nn.Module], config: Compile, *, async_tensor: bool) -> None:
    """Compile the forward pass of each block, in place, if the config asks for it.

    With `async_tensor` inductor puts products and the collectives beside them into one operator of symmetric memory,
    which works on one piece while another is on its way.

    The method is compiled and not the module: names stay, and the hooks by which FSDP gathers parameters run
    outside of the graph, which would break at them.
    """
    if not config.blocks:
        return
    # A private switch of inductor, in torch 2.11 to 2.13 the only one.
    options: dict[str, Any] | None = {"_micro_pipeline_tp": True} if async_tensor else None
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=config.backend, fullgraph=True, options=options)
