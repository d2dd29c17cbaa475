"""Regional compilation: a model's blocks, one graph each."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from titanlab.compile.schema import Compile


def compile_blocks(blocks: Iterable[nn.Module], config: Compile) -> None:
    """Compile the forward pass of each block, in place, if the config asks for it.

    The method is compiled and not the module: names stay, and the hooks by which FSDP gathers parameters run
    outside of the graph, which would break at them.
    """
    if config.blocks:
        for block in blocks:
            block.forward = torch.compile(block.forward, backend=config.backend, fullgraph=True)
