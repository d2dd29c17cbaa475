"""The contract of the compiler; its config is `titanlab.techniques.compile.schema.Compile`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

F = TypeVar("F", bound=Callable[..., Any])


class Compiler(Protocol):
    """Compiles the parts of the model that the config names."""

    def compile_blocks(
        self,
        blocks: Iterable[nn.Module],
        *,
        async_group: dist.ProcessGroup | None = None,
        memory_budget: float | None = None,
    ) -> None:
        """Compile the forward pass of each block, in place.

        Args:
            async_group: for AsyncTP: a product and the neighbouring collective of this group become one operator of
                symmetric memory, which computes one piece while it sends another. None: they stay separate.
            memory_budget: share of a block's activations that is kept between forward and backward; None: the
                backend decides.
        """

    def compile_loss(self, function: F) -> F:
        """Return the loss function, or a part of it, compiled."""
