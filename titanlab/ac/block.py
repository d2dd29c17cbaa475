"""A block that keeps its input, and what a policy chooses, and computes the rest of its forward again.

The block's own `forward` is exchanged, and no module is put around it: names stay, FSDP's hooks gather parameters
outside of what is computed twice, and a compiler finds one function for all blocks.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

# In the block's own attributes: what a compiler reads there may differ from block to block in value only.
_CONTEXTS = "checkpoint_contexts"
_FORWARD = "forward_once"

Contexts = Callable[[], tuple[Any, Any]]


def checkpoint_block(block: nn.Module, contexts: Contexts | None = None) -> None:
    """Let a block be computed again in its backward pass, in place.

    Args:
        contexts: as `torch.utils.checkpoint` takes them: makes two contexts, of the forward pass and of its
            repetition. The same object for all blocks, so that they share one compilation. None: nothing but the
            block's inputs is kept.
    """
    if "forward" in vars(block):
        # Somebody has exchanged it before.
        setattr(block, _FORWARD, block.forward)
    if contexts is None:
        block.forward = types.MethodType(block_computed_again, block)
    else:
        setattr(block, _CONTEXTS, contexts)
        block.forward = types.MethodType(block_computed_in_part, block)


# Each pass over the block's forward begins with a new pair of contexts, so that policies that count begin anew, for
# several microbatches in flight as well. The state of random generators is put back: a model may have dropout. torch
# ends the repetition as soon as the last tensor that is needed is there.


def block_computed_again(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    return checkpoint(_once(block), *inputs, use_reentrant=False, **named)


def block_computed_in_part(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    contexts = getattr(block, _CONTEXTS)
    return checkpoint(_once(block), *inputs, use_reentrant=False, context_fn=contexts, **named)


def _once(block: nn.Module) -> Callable[..., Any]:
    if _FORWARD in vars(block):
        forward: Callable[..., Any] = getattr(block, _FORWARD)
        return forward

    # By the class, not by a method bound to this block: for compilers the function is the same for all blocks.
    def once(*inputs: Any, **named: Any) -> Any:
        return type(block).forward(block, *inputs, **named)

    return once
