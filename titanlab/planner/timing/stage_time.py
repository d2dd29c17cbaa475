"""The stages of a pipeline's ranks, as sums over the times of their pieces."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from titanlab.costs.account import Operation
from titanlab.planner.model_facts import Key, model_facts
from titanlab.planner.timing.block_time import ModelTime
from titanlab.planner.timing.pipeline_time import Stages, StageTime, stages_of
from titanlab.recipe.stage_pieces import stage_pieces


class RankTime(NamedTuple):
    """Sums over the pieces of one stage or of one rank, in seconds for one microbatch.

    Attributes:
        blocks: their number.
        edges: the other pieces.
        block_forward, block_backward: of all blocks together, with exposed communication.
    """

    blocks: int
    edges: tuple[str, ...]
    compute: float
    tensor: float
    context: float
    time: StageTime
    block_forward: float
    block_backward: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RankStages:
    """The stages of a recipe: those of the rank that computes longest, and all of them if there is a pipeline."""

    busiest: RankTime
    pipeline: Stages | None


@functools.lru_cache(maxsize=16384)
def rank_stages(times: ModelTime, model: Key, schedule: Key, split: Key, ranks: int, seq_len: int) -> RankStages:
    """The stages of a recipe; without a pipeline, one."""
    if ranks == 1:
        return RankStages(busiest=_stage(times, 0, len(times.kind_of), tuple(times.edges)), pipeline=None)
    placement = schedule.value.placement(ranks=ranks)
    stages = [_stage(times, *part) for part in _split(model, schedule, split, ranks, seq_len)]
    pipeline = stages_of([stage.time for stage in stages], placement, ranks=ranks)
    own = [stage for stage, rank in zip(stages, placement, strict=True) if rank == pipeline.busiest]
    merged = RankTime(
        blocks=sum(stage.blocks for stage in own),
        edges=tuple(name for stage in own for name in stage.edges),
        compute=sum(stage.compute for stage in own),
        tensor=sum(stage.tensor for stage in own),
        context=sum(stage.context for stage in own),
        time=StageTime(*(sum(parts) for parts in zip(*(stage.time for stage in own), strict=True))),
        block_forward=sum(stage.block_forward for stage in own),
        block_backward=sum(stage.block_backward for stage in own),
    )
    return RankStages(busiest=merged, pipeline=pipeline)


def _stage(times: ModelTime, first: int, blocks: int, edges: tuple[str, ...]) -> RankTime:
    """Sums over some blocks, from the first on, and other pieces."""
    own = [times.kinds[kind] for kind in times.kind_of[first : first + blocks]]
    pieces = [*own, *(times.edges[name] for name in edges if name in times.edges)]
    weights = sum(piece.weights for piece in pieces)
    return RankTime(
        blocks=blocks,
        edges=edges,
        compute=sum(piece.compute for piece in pieces),
        tensor=sum(piece.tensor_forward + piece.tensor_backward for piece in pieces),
        context=sum(piece.context_forward + piece.context_backward for piece in pieces),
        time=StageTime(sum(piece.ahead for piece in pieces), sum(piece.back for piece in pieces) - weights, weights),
        block_forward=sum(piece.ahead for piece in own),
        block_backward=sum(piece.back for piece in own),
    )


@functools.lru_cache(maxsize=16384)
def _split(model: Key, schedule: Key, split: Key, ranks: int, seq_len: int) -> list[tuple[int, int, tuple[str, ...]]]:
    """By stage: number of its first block, number of its blocks, and its other pieces."""
    facts = model_facts(model)
    # The shares of the pieces do not depend on the microbatch.
    sizes = {"batch": 1, "seq_len": seq_len}
    block: list[Operation] = model.value.block_operations(**sizes)
    stages = stage_pieces(
        facts.account,
        split=split.value,
        placement=schedule.value.placement(ranks=ranks),
        block=block,
        edges=model.value.edge_operations(**sizes),
    )
    found, number = [], 0
    for pieces in stages:
        blocks = sum(piece.startswith("layers.") for piece in pieces)
        found.append((number, blocks, tuple(piece for piece in pieces if not piece.startswith("layers."))))
        number += blocks
    return found
