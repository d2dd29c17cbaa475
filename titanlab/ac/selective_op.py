"""ac=selective_op: blocks keep the results of some operators and recompute the others."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from titanlab.ac.block import checkpoint_block
from titanlab.ac.selective_op_schema import MATMULS, SAME, SelectiveOp


class SelectedOperators:
    """Every block keeps its input and the results of the chosen operators."""

    def __init__(self, config: SelectiveOp) -> None:
        self._config = config

    def apply(self, blocks: Mapping[int, nn.Module]) -> None:
        """See `ActivationCheckpointing`.

        Raises:
            ConfigError: torch lacks an operator, although the model has been imported.
        """
        self._config.check_known(self.known_operators(), all_imported=True)
        # Compilers compare the partial's arguments; they are plain values, so that all blocks share one compilation.
        contexts = functools.partial(_contexts, tuple(self._config.saved), self._config.every_other_matmul)
        for block in blocks.values():
            checkpoint_block(block, contexts)

    @staticmethod
    def known_operators() -> frozenset[str]:
        """Names of all operators that are registered in this process, as torch prints them."""
        # Private in torch 2.11 to 2.13; no public function lists operators that have not been used yet.
        return frozenset(_printed(name) for name in torch._C._dispatch_get_all_op_names())


def _printed(name: str) -> str:
    """`aten::max.dim` → `aten.max.dim`, `aten::mm` → `aten.mm.default`."""
    operator, _, overload = name.partition(".")
    return f"{operator.replace('::', '.')}.{overload or 'default'}"


def _contexts(saved: tuple[str, ...], every_other: bool) -> tuple[Any, Any]:  # noqa: FBT001 (by a partial)
    create: Any = create_selective_checkpoint_contexts  # untyped in torch 2.11 to 2.13
    contexts: tuple[Any, Any] = create(_Policy(saved, every_other=every_other))
    return contexts


class _Policy:
    """Chooses the results that a block keeps; it counts products separately in the forward and in its recomputation."""

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
    name = str(operator)
    return SAME.get(name, name)
