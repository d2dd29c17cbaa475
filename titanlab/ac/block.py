"""Recomputation of a block's forward in its backward: all of it, or the parts that a policy does not keep.

The block's `forward` is replaced, instead of wrapping the block in a module: parameter names do not change, FSDP's
hooks are not recomputed, and a compiler sees one function for all blocks.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from titanlab.ac.contract import ACConfig

# Attributes of a block. With torch.compile their values may differ between blocks, but not their names.
_CONTEXTS = "checkpoint_contexts"
_FORWARD = "forward_once"

Contexts = Callable[[], tuple[Any, Any]]


class WholeBlocks:
    """Recomputes the blocks that a config chooses from their inputs; does not change other blocks."""

    def __init__(self, config: ACConfig) -> None:
        self._config = config

    def apply(self, blocks: Mapping[int, nn.Module]) -> None:
        """See `ActivationCheckpointing`."""
        for number, block in blocks.items():
            if self._config.recomputes(number):
                checkpoint_block(block)


def checkpoint_block(block: nn.Module, contexts: Contexts | None = None) -> None:
    """Let a block be recomputed in its backward pass, in place.

    Args:
        contexts: `context_fn` of `torch.utils.checkpoint`: makes two contexts, for the forward pass and for its
            recomputation. All blocks must get the same object, so that they share one compilation. None: keep only
            the block's inputs.
    """
    if "forward" in vars(block):
        # Other code has already replaced `forward`.
        setattr(block, _FORWARD, block.forward)
    if contexts is None:
        block.forward = types.MethodType(recomputed_forward, block)
    else:
        setattr(block, _CONTEXTS, contexts)
        block.forward = types.MethodType(partly_recomputed_forward, block)


# Each forward pass gets new contexts, so that policies which count operators start at 0, also with several microbatches
# in flight. torch restores the states of random generators (for dropout), and stops the recomputation at the last
# tensor that the backward needs.


def recomputed_forward(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    return checkpoint(_once(block), *inputs, use_reentrant=False, **named)


def partly_recomputed_forward(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    contexts = getattr(block, _CONTEXTS)
    return checkpoint(_once(block), *inputs, use_reentrant=False, context_fn=contexts, **named)


def _once(block: nn.Module) -> Callable[..., Any]:
    if _FORWARD in vars(block):
        forward: Callable[..., Any] = getattr(block, _FORWARD)
        return forward

    # The function of the class, not a bound method, so that compilers see the same function for all blocks.
    def once(*inputs: Any, **named: Any) -> Any:
        return type(block).forward(block, *inputs, **named)

    return once
