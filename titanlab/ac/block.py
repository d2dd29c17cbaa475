"""Recomputing a block's forward in its backward: all of it, or what a policy does not keep.

The block's own `forward` is replaced, and no module is wrapped around it: names stay, FSDP's hooks gather parameters
outside of what is recomputed, and a compiler sees one function for all blocks.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from titanlab.ac.contract import ACConfig

# Attributes of the block. A compiler allows their values to differ from block to block, but not their names.
_CONTEXTS = "checkpoint_contexts"
_FORWARD = "forward_once"

Contexts = Callable[[], tuple[Any, Any]]


class WholeBlocks:
    """The blocks that a config chooses keep their inputs only; other blocks stay as they are."""

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
            recomputation. Pass the same object for all blocks, so that they share one compilation. None: only the
            block's inputs are kept.
    """
    if "forward" in vars(block):
        # Other code has replaced it before.
        setattr(block, _FORWARD, block.forward)
    if contexts is None:
        block.forward = types.MethodType(recomputed_forward, block)
    else:
        setattr(block, _CONTEXTS, contexts)
        block.forward = types.MethodType(partly_recomputed_forward, block)


# Each forward pass gets a new pair of contexts, so that policies which count operators start at 0, also with several
# microbatches in flight. torch restores the state of random generators, for models with dropout, and stops the
# recomputation when it has the last tensor that the backward needs.


def recomputed_forward(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    return checkpoint(_once(block), *inputs, use_reentrant=False, **named)


def partly_recomputed_forward(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    contexts = getattr(block, _CONTEXTS)
    return checkpoint(_once(block), *inputs, use_reentrant=False, context_fn=contexts, **named)


def _once(block: nn.Module) -> Callable[..., Any]:
    if _FORWARD in vars(block):
        forward: Callable[..., Any] = getattr(block, _FORWARD)
        return forward

    # The class's function, not a method bound to this block: compilers see the same function for all blocks.
    def once(*inputs: Any, **named: Any) -> Any:
        return type(block).forward(block, *inputs, **named)

    return once
