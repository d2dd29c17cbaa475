"""ac=selective_op: blocks keep the results of some operators and compute the others again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from titanlab.ac.block import checkpoint_block
from titanlab.ac.selective_op_schema import MATMULS, SelectiveOp


def apply(config: SelectiveOp, blocks: Mapping[int, nn.Module]) -> None:
    """Checkpoint all blocks, in place.

    Raises:
        ConfigError: there is no operator of a name, now that all have been imported.
    """
    config.refuse_unknown(known_operators(), final=True)
    # Of plain values, which compilers compare: one compilation for all blocks.
    contexts = functools.partial(_contexts, tuple(config.saved), config.every_other_matmul)
    for block in blocks.values():
        checkpoint_block(block, contexts)


def known_operators() -> frozenset[str]:
    """Every operator that this process has, as torch prints it."""
    # Private, in torch 2.11 as in 2.13: of public names there is none that lists what nobody has asked for yet.
    return frozenset(_printed(name) for name in torch._C._dispatch_get_all_op_names())


def _printed(name: str) -> str:
    """`aten::max.dim` → `aten.max.dim`, `aten::mm` → `aten.mm.default`."""
    operator, _, overload = name.partition(".")
    return f"{operator.replace('::', '.')}.{overload or 'default'}"


def _contexts(saved: tuple[str, ...], every_other: bool) -> tuple[Any, Any]:  # noqa: FBT001 (by a partial)
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_Policy(saved, every_other=every_other))
    return contexts


class _Policy:
    """Which results one pass over a block keeps. It counts products, in the forward and in its repetition alike."""

    def __init__(self, saved: tuple[str, ...], *, every_other: bool) -> None:
        self._saved = frozenset(saved)
        self._counted = frozenset(MATMULS) if every_other else frozenset()
        self._count = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
        name = _name(operator)
        if name not in self._saved:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if name in self._counted:
            self._count[context.is_recompute] += 1
            if self._count[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE


@functools.cache
def _name(operator: Any) -> str:
    return str(operator)
