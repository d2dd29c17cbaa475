"""Recomputation of a block's forward in its backward: all of it, or the parts that a policy does not keep.

The block's `forward` is replaced, instead of wrapping the block in a module: parameter names do not change, FSDP's
hooks are not recomputed, and a compiler sees one function for all blocks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlab.techniques.ac.contract import ACConfig
from titanlab.techniques.ac.recomputation_schema import MATMULS, SAME, SelectiveOp

# Names of attributes of recomputed blocks: torch.compile allows different values in different blocks, but not names.
_CONTEXTS = "checkpoint_contexts"
_FORWARD = "forward_once"

Contexts = Callable[[], tuple[Any, Any]]


class WholeBlocks:
    """Recomputes the blocks that a config chooses from their inputs; does not change other blocks."""

    def __init__(self, config: ACConfig) -> None:
        self._config = config

    def apply(self, blocks: Mapping[int, nn.Module]) -> None:
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
# tensor that the backward needs. There are two functions, because torch's compiler takes no `noop_context_fn` from an
# attribute.


def recomputed_forward(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    return checkpoint(_once(block), *inputs, use_reentrant=False, **named)


def partly_recomputed_forward(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    contexts = getattr(block, _CONTEXTS)
    return checkpoint(_once(block), *inputs, use_reentrant=False, context_fn=contexts, **named)


def _once(block: nn.Module) -> Callable[..., Any]:
    if _FORWARD in vars(block):
        forward: Callable[..., Any] = getattr(block, _FORWARD)
        return forward

    # Call the function of the class, not a bound method: compilers then see the same function for all blocks.
    def once(*inputs: Any, **named: Any) -> Any:
        return type(block).forward(block, *inputs, **named)

    return once


class SelectedOperators:
    """Lets every block keep its input and the results of the chosen operators, and recompute the rest."""

    def __init__(self, config: SelectiveOp) -> None:
        self._config = config

    def apply(self, blocks: Mapping[int, nn.Module]) -> None:
        # By now the model has been imported, so the operators of its package are registered.
        self._config.check_known(self.known_operators(), all_imported=True)
        # The partial's arguments are plain values. Compilers compare them, so that all blocks share one compilation.
        contexts = functools.partial(_contexts, tuple(self._config.saved), self._config.every_other_matmul)
        for block in blocks.values():
            checkpoint_block(block, contexts)

    @staticmethod
    def known_operators() -> frozenset[str]:
        """Names of all operators that are registered in this process, as torch prints them."""
        # This function is private in torch 2.11 to 2.13; no public one lists operators that have not been used yet.
        names = (name.partition(".") for name in torch._C._dispatch_get_all_op_names())
        # `aten::max.dim` → `aten.max.dim`, `aten::mm` → `aten.mm.default`.
        return frozenset(f"{name.replace('::', '.')}.{overload or 'default'}" for name, _, overload in names)


def _contexts(saved: tuple[str, ...], every_other: bool) -> tuple[Any, Any]:  # noqa: FBT001 (by a partial)
    # Number of matrix products so far: in the forward pass (False), and in its recomputation (True).
    count = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
        name = _name(operator)
        if name not in saved:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if every_other and name in MATMULS:
            count[context.is_recompute] += 1
            if count[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    create: Any = create_selective_checkpoint_contexts  # untyped in torch 2.11 to 2.13
    contexts: tuple[Any, Any] = create(policy)
    return contexts


@functools.cache
def _name(operator: Any) -> str:
    name = str(operator)
    return SAME.get(name, name)
