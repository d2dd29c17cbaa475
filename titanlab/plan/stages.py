"""Cached values that recipes of a search share: facts of a model, its pieces by stage, the actions of schedules."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from titanlab.costs import ModelAccount, Operation, Share, block_name, hidden_shape, is_in_block
from titanlab.recipe import Recipe, stage_pieces
from titanlab.techniques.ac.contract import ACConfig
from titanlab.techniques.model.contract import ModelConfig
from titanlab.techniques.schedule.action import Action
from titanlab.techniques.schedule.contract import PipelineSchedule


# The lists of actions are long: cache few of them.
@functools.lru_cache(maxsize=64)
def actions_of(schedule: PipelineSchedule, ranks: int, microbatches: int) -> Sequence[Sequence[Action]]:
    actions: Sequence[Sequence[Action]] = schedule.actions(ranks=ranks, microbatches=microbatches)
    return actions


@dataclass(frozen=True)
class Seen:
    """A recipe as the argument of a cached function. The function may read only recipe values that are in `key`."""

    key: tuple[Any, ...]
    recipe: Recipe = field(compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFacts:
    """The facts of a model that estimates need.

    Attributes:
        sample: account of the pieces outside the blocks and of the middle block, `block`, which stands for all blocks.
        before, after: names of the pieces before and after the blocks.
    """

    account: ModelAccount
    sample: ModelAccount
    block: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def model_facts(model: ModelConfig) -> ModelFacts:
    account: ModelAccount = model.account()
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


def share_of(recipe: Recipe) -> Share:
    """One rank's share of a recipe's activations."""
    layout = recipe.layout
    return Share(
        element_bytes=recipe.precision.formats().compute_bytes,
        accelerator=recipe.cluster.accelerator,
        tensor=layout.tensor,
        context=layout.context,
        sequence_parallel=recipe.parallelism.sequence_parallel,
        expert=layout.expert,
    )


def message_bytes(recipe: Recipe) -> int:
    """Bytes of the hidden states that one stage of a pipeline sends to the next, for one microbatch."""
    shape = hidden_shape(
        recipe.layout,
        microbatch=recipe.microbatch,
        seq_len=recipe.training.seq_len,
        dim=model_facts(recipe.model).account.dim,
        sequence_parallel=recipe.parallelism.sequence_parallel,
    )
    return math.prod(shape) * recipe.precision.formats().compute_bytes


@functools.lru_cache(maxsize=1024)
def block_operations(model: ModelConfig, microbatch: int, seq_len: int) -> tuple[Operation, ...]:
    return tuple(model.block_operations(batch=microbatch, seq_len=seq_len))


@functools.lru_cache(maxsize=1024)
def edge_operations(model: ModelConfig, microbatch: int, seq_len: int) -> tuple[Operation, ...]:
    return tuple(model.edge_operations(batch=microbatch, seq_len=seq_len))


@functools.lru_cache(maxsize=256)
def treatments(ac: ACConfig, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each way in which a policy treats blocks, the first such block; and for each block, the index of its way."""
    all_treatments = [ac.treatment(number) for number in range(layers)]
    different = list(dict.fromkeys(all_treatments))
    return tuple(map(all_treatments.index, different)), tuple(map(different.index, all_treatments))


class StagePieces(NamedTuple):
    """The pieces of a stage: numbers of its blocks, and names of its other pieces."""

    blocks: tuple[int, ...]
    edges: tuple[str, ...]


@functools.lru_cache(maxsize=16384)
def parts_of(pieces: tuple[str, ...]) -> StagePieces:
    return StagePieces(
        tuple(int(piece.rpartition(".")[2]) for piece in pieces if is_in_block(piece)),
        tuple(piece for piece in pieces if not is_in_block(piece)),
    )


@functools.lru_cache(maxsize=4096)
def splits_backward(schedule: PipelineSchedule, ranks: int, microbatches: int) -> bool:
    """Whether gradients of weights are computed separately from gradients of inputs."""
    splits: bool = ranks > 1 and schedule.splits_backward(ranks=ranks, microbatches=microbatches)
    return splits


def stages_of(
    model: ModelConfig, schedule: PipelineSchedule, split: tuple[Any, ...] | None, ranks: int, seq_len: int
) -> tuple[tuple[str, ...], ...]:
    """The pieces of each stage.

    Raises:
        ConfigError: the split does not fit the model or the number of stages.
    """
    if ranks == 1:
        return (tuple(model_facts(model).account.pieces or ("",)),)
    return _stages(model, placement_of(schedule, ranks), split, seq_len)


@functools.lru_cache(maxsize=4096)
def _stages(
    model: ModelConfig, placement: tuple[int, ...], split: tuple[Any, ...] | None, seq_len: int
) -> tuple[tuple[str, ...], ...]:
    # A microbatch of 1 is enough: the relative costs of pieces do not depend on it.
    stages = stage_pieces(
        model_facts(model).account,
        split=split,
        placement=placement,
        block=block_operations(model, 1, seq_len),
        edges=edge_operations(model, 1, seq_len),
    )
    return tuple(stages)


@functools.lru_cache(maxsize=4096)
def placement_of(schedule: PipelineSchedule, ranks: int) -> tuple[int, ...]:
    return (0,) if ranks == 1 else tuple(schedule.placement(ranks=ranks))
