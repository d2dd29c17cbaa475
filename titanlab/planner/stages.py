"""The pieces of a model in each stage of a pipeline, computed once for all recipes that share them."""

from __future__ import annotations

import functools

from titanlab.planner.model_facts import Key, model_facts
from titanlab.recipe.stage_pieces import stage_pieces


@functools.lru_cache(maxsize=4096)
def stages_of(model: Key, schedule: Key, split: Key, ranks: int, seq_len: int) -> tuple[tuple[str, ...], ...]:
    """By stage.

    Raises:
        ConfigError: the split does not fit the model or the number of stages.
    """
    account = model_facts(model).account
    if ranks == 1:
        return (tuple(account.pieces or ("",)),)
    # The shares of the pieces do not depend on the microbatch.
    sizes = {"batch": 1, "seq_len": seq_len}
    stages = stage_pieces(
        account,
        split=split.value,
        placement=placement_of(schedule, ranks),
        block=model.value.block_operations(**sizes),
        edges=model.value.edge_operations(**sizes),
    )
    return tuple(stages)


@functools.lru_cache(maxsize=4096)
def placement_of(schedule: Key, ranks: int) -> tuple[int, ...]:
    """The rank of each stage."""
    return (0,) if ranks == 1 else tuple(schedule.value.placement(ranks=ranks))
