"""The stages of a pipeline's ranks, as sums over the times of their pieces."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from titanlab.costs.account import is_in_block
from titanlab.plan.block_time import ModelTime, total
from titanlab.plan.pipeline_time import Stages, StageTime, stages_of
from titanlab.plan.stages import placement_of
from titanlab.plan.stages import stages_of as parts_of
from titanlab.techniques.model.contract import ModelConfig
from titanlab.techniques.schedule.contract import PipelineSchedule


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
def rank_stages(
    times: ModelTime,
    model: ModelConfig,
    schedule: PipelineSchedule,
    split: tuple[Any, ...] | None,
    ranks: int,
    seq_len: int,
) -> RankStages:
    """The stages of a recipe; without a pipeline, one."""
    if ranks == 1:
        return RankStages(busiest=_stage(times, _StageKind(times.kind_of, tuple(times.edges))), pipeline=None)
    placement = placement_of(schedule, ranks)
    kinds, kind_of = _different(parts_of(model, schedule, split, ranks, seq_len), times.kind_of)
    different = [_stage(times, part) for part in kinds]
    pipeline = stages_of([stage.time for stage in different], kind_of, placement, ranks=ranks)
    own = [different[kind] for kind, rank in zip(kind_of, placement, strict=True) if rank == pipeline.busiest]
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


class _StageKind(NamedTuple):
    """The pieces of a stage: kinds of its blocks, and names of the others."""

    kind_of: tuple[int, ...]
    edges: tuple[str, ...]


@functools.lru_cache(maxsize=16384)
def _stage(times: ModelTime, part: _StageKind) -> RankTime:
    """Sums over the pieces of a stage."""
    own, whole = total(times, part.kind_of, ()), total(times, part.kind_of, part.edges)
    return RankTime(
        blocks=len(part.kind_of),
        edges=part.edges,
        compute=whole.compute,
        tensor=whole.tensor_forward + whole.tensor_backward,
        context=whole.context_forward + whole.context_backward,
        time=StageTime(whole.ahead, whole.back - whole.weights, whole.weights),
        block_forward=own.ahead,
        block_backward=own.back,
    )


@functools.lru_cache(maxsize=16384)
def _different(
    stages: tuple[tuple[str, ...], ...], kind_of: tuple[int, ...]
) -> tuple[tuple[_StageKind, ...], tuple[int, ...]]:
    """The different stages, and the number in them of each stage."""
    parts, first = [], 0
    for pieces in stages:
        edges = tuple(piece for piece in pieces if not is_in_block(piece))
        blocks = len(pieces) - len(edges)
        # The order of blocks changes no sum.
        parts.append(_StageKind(tuple(sorted(kind_of[first : first + blocks])), edges))
        first += blocks
    different = list(dict.fromkeys(parts))
    return tuple(different), tuple(map(different.index, parts))
