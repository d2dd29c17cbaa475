"""Memory of CUDA graphs: what a recorded graph returns is overwritten when the next microbatch runs it again.

torch keeps one generation of results. Without being told where a microbatch begins it takes the end of any graph's
backward for the end of a step, and would free what the other blocks' backwards still need.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class GraphMemory:
    """Marks where microbatches begin, and copies what outlives them; without CUDA graphs it does nothing.

    Args:
        records: whether parts of the model are recorded as CUDA graphs.
    """

    def __init__(self, *, records: bool) -> None:
        self._records = records

    def begin(self) -> None:
        """Called before each microbatch's forward: results of earlier ones may be overwritten from here on."""
        if self._records:
            torch.compiler.cudagraph_mark_step_begin()

    def kept(self, result: torch.Tensor) -> torch.Tensor:
        """A result that outlives its microbatch."""
        return result.clone() if self._records else result

    def keep_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Called after the first of several microbatches, to whose gradients those of the others are added."""
        if self._records:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
