"""Splits the pieces of a model into the stages of a pipeline, by cost or as the recipe says."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from titanlab.costs.account import ModelAccount, Operation, is_in_block
from titanlab.errors import ConfigError
from titanlab.schedule.split import split as balanced

KEY = "parallelism.split"
# FLOPs that take as long as reading and writing one element. A core moves about 1e9 elements a second and computes
# 5e10 to 1e11 FLOP/s; for a GPU the ratio is a little higher.
ELEMENT_FLOPS = 100


def stage_pieces(
    account: ModelAccount,
    *,
    split: Sequence[Any] | None,
    placement: Sequence[int],
    block: Sequence[Operation],
    edges: Sequence[Operation],
) -> list[tuple[str, ...]]:
    """Pieces of every stage, by stage.

    Args:
        split: see `Parallelism.split`.
        placement: rank of every stage.
        block: the operations of a block of the model.
        edges: the operations outside of blocks; each has the name of its piece.

    Raises:
        ConfigError: the split does not fit the model or the number of stages.
    """
    pieces, stages = account.pieces, len(placement)
    if split is None:
        first = list(_balanced(tuple(_costs(account, block, edges)), tuple(placement)))
    elif all(isinstance(item, int) for item in split):
        first = _by_counts(account, list(split), stages)
    else:
        first = _by_names(account, [str(item) for item in split], stages)
    return [pieces[begin:end] for begin, end in zip(first, [*first[1:], len(pieces)], strict=True)]


@functools.cache
def _balanced(costs: tuple[float, ...], placement: tuple[int, ...]) -> tuple[int, ...]:
    """First piece of every stage; cached, because a sweep calls it often and a search can take tenths of a second."""
    return tuple(balanced(costs, stages=len(placement), placement=placement))


def _costs(account: ModelAccount, block: Sequence[Operation], edges: Sequence[Operation]) -> list[float]:
    edge_costs = {operation.name: _cost([operation]) for operation in edges}
    return [_cost(block) if is_in_block(piece) else edge_costs.get(piece, 0.0) for piece in account.pieces]


def _cost(operations: Sequence[Operation]) -> float:
    return sum(operation.flops + ELEMENT_FLOPS * math.prod(operation.output) for operation in operations)


def _by_counts(account: ModelAccount, counts: list[int], stages: int) -> list[int]:
    """First pieces of stages with given numbers of blocks; other pieces belong to the first or the last stage."""
    if len(counts) != stages:
        rule = f"has {len(counts)} numbers of blocks, and the schedule has {stages} stages"
        raise ConfigError(KEY, as_typed(counts), rule, f"try null for a balanced split, or give {stages} numbers")
    if min(counts) < 0 or sum(counts) != account.layers or 0 in counts[1:-1]:
        rule = f"must add up to the model's {account.layers} blocks"
        if 0 in counts[1:-1] or min(counts) < 0:
            rule += ", with one at least for each stage between first and last"
        raise ConfigError(KEY, as_typed(counts), rule, "try null for a balanced split")
    blocks = [place for place, piece in enumerate(account.pieces) if is_in_block(piece)]
    begins = [sum(counts[:stage]) for stage in range(1, stages)]
    first = [0, *(blocks[begin] if begin < len(blocks) else blocks[-1] + 1 for begin in begins)]
    return _increasing(account, counts, first)


def _by_names(account: ModelAccount, names: list[str], stages: int) -> list[int]:
    if len(names) != stages - 1:
        rule = f"must name a piece for each of the {stages - 1} stages after the first, and names {len(names)}"
        raise ConfigError(KEY, as_typed(names), rule, "try null for a balanced split")
    unknown = [name for name in names if name not in account.pieces]
    if unknown:
        rule = f"the model has no piece {unknown[0]}"
        raise ConfigError(KEY, as_typed(names), rule, f"its pieces are {_listed(account.pieces)}")
    return _increasing(account, names, [0, *(account.pieces.index(name) for name in names)])


def _increasing(account: ModelAccount, split: Sequence[object], first: list[int]) -> list[int]:
    ends = [*first[1:], len(account.pieces)]
    for stage, (begin, end) in enumerate(zip(first, ends, strict=True)):
        if begin >= end:
            rule = f"stage {stage} would begin with {account.pieces[begin]} and end before {account.pieces[end]}"
            cure = "name pieces in the order of the forward pass, each once, or null for a balanced split"
            raise ConfigError(KEY, as_typed(split), rule, cure)
    return first


def as_typed(split: Sequence[object]) -> str:
    """A split as it is written in an override."""
    return f"[{','.join(map(str, split))}]"


def _listed(pieces: Sequence[str]) -> str:
    shown = [*pieces[:2], "…", *pieces[-3:]] if len(pieces) > 6 else pieces
    return ", ".join(shown)
