"""The pieces of a model in each stage of a pipeline, computed once for all recipes that share them."""

from __future__ import annotations

import functools
from typing import NamedTuple

from titanlab.costs.block_names import is_in_block
from titanlab.costs.config_key import Key
from titanlab.planner.model_facts import block_operations, edge_operations, model_facts
from titanlab.recipe.stage_pieces import stage_pieces


class Parts(NamedTuple):
    """The pieces of a stage.

    Attributes:
        blocks: their numbers.
        edges: names of the other pieces.
    """

    blocks: tuple[int, ...]
    edges: tuple[str, ...]


@functools.lru_cache(maxsize=16384)
def parts_of(pieces: tuple[str, ...]) -> Parts:
    """The blocks and the other pieces of a stage."""
    return Parts(
        tuple(int(piece.rpartition(".")[2]) for piece in pieces if is_in_block(piece)),
        tuple(piece for piece in pieces if not is_in_block(piece)),
    )


def stages_of(model: Key, schedule: Key, split: Key, ranks: int, seq_len: int) -> tuple[tuple[str, ...], ...]:
    """By stage.

    Raises:
        ConfigError: the split does not fit the model or the number of stages.
    """
    if ranks == 1:
        return (tuple(model_facts(model).account.pieces or ("",)),)
    return _stages(model, placement_of(schedule, ranks), split, seq_len)


@functools.lru_cache(maxsize=4096)
def _stages(model: Key, placement: tuple[int, ...], split: Key, seq_len: int) -> tuple[tuple[str, ...], ...]:
    # The shares of the pieces do not depend on the microbatch.
    stages = stage_pieces(
        model_facts(model).account,
        split=split.value,
        placement=placement,
        block=block_operations(model, 1, seq_len),
        edges=edge_operations(model, 1, seq_len),
    )
    return tuple(stages)


@functools.lru_cache(maxsize=4096)
def placement_of(schedule: Key, ranks: int) -> tuple[int, ...]:
    """The rank of each stage."""
    return (0,) if ranks == 1 else tuple(schedule.value.placement(ranks=ranks))
