"""What all recipes of a search share, made once: facts of a model, its pieces by stage, the actions of schedules."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from titanlab.costs.account import ModelAccount, Operation, block_name, is_in_block, training_flops_per_token
from titanlab.costs.config_key import Key, key_of
from titanlab.recipe.recipe import stage_pieces
from titanlab.techniques.schedule.action import Action


# Long lists: few of them are kept.
@functools.lru_cache(maxsize=64)
def actions_of(schedule: Key, ranks: int, microbatches: int) -> Sequence[Sequence[Action]]:
    """Actions by rank."""
    actions: Sequence[Sequence[Action]] = schedule.value.actions(ranks=ranks, microbatches=microbatches)
    return actions


class Remembered:
    """The config of a schedule that makes its actions once."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def actions(self, *, ranks: int, microbatches: int) -> Sequence[Sequence[Action]]:
        """See `PipelineSchedule`."""
        return actions_of(key_of(self._schedule), ranks, microbatches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)


T = TypeVar("T")


class Unkeyed(Generic[T]):
    """A value that a cache does not look at: the rest of its key decides the result."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unkeyed)

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFacts:
    """What estimates need of a model.

    Attributes:
        account: of the whole model.
        sample: account of the edges and of one block, which stands for all: the middle one.
        block: name of that block.
        before, after: pieces before and after the blocks.
    """

    account: ModelAccount
    sample: ModelAccount
    block: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def model_facts(model: Key) -> ModelFacts:
    """The facts of the model with this config."""
    account: ModelAccount = model.value.account()
    block = block_name(account.layers // 2)
    pieces = account.pieces or ("",)
    blocks = [place for place, piece in enumerate(pieces) if is_in_block(piece)]
    before, after = pieces[: min(blocks, default=0)], pieces[max(blocks, default=-1) + 1 :]
    parameters = {
        name: shape
        for name, shape in account.parameters.items()
        if not is_in_block(name) or name.startswith(f"{block}.")
    }
    sample = replace(account, parameters=parameters, layers=1, pieces=(*before, block, *after))
    return ModelFacts(account=account, sample=sample, block=block, before=before, after=after)


@functools.lru_cache(maxsize=1024)
def flops_per_token(model: Key, seq_len: int) -> int:
    """See `titanlab.costs.account.training_flops_per_token`."""
    return training_flops_per_token(model_facts(model).account, seq_len=seq_len)


@functools.lru_cache(maxsize=1024)
def block_operations(model: Key, microbatch: int, seq_len: int) -> tuple[Operation, ...]:
    """The operations of a block for a microbatch."""
    return tuple(model.value.block_operations(batch=microbatch, seq_len=seq_len))


@functools.lru_cache(maxsize=1024)
def edge_operations(model: Key, microbatch: int, seq_len: int) -> tuple[Operation, ...]:
    """The operations outside blocks for a microbatch."""
    return tuple(model.value.edge_operations(batch=microbatch, seq_len=seq_len))


@functools.lru_cache(maxsize=256)
def treatments(ac: Key, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first block of each treatment, and the number of the treatment of each block."""
    all_treatments = [ac.value.treatment(number) for number in range(layers)]
    different = list(dict.fromkeys(all_treatments))
    return tuple(map(all_treatments.index, different)), tuple(map(different.index, all_treatments))


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
