"""The time of one stage of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from titanlab.costs.account import is_in_block
from titanlab.costs.config_key import Key
from titanlab.costs.layout import Layout
from titanlab.costs.traffic_account import (
    Coordinate,
    Row,
    Step,
    Traffic,
    add_context,
    add_exchange,
    add_sharding,
    add_tensor,
    parameter_elements,
    sum_whole_gradients,
)
from titanlab.plan.block_time import ModelTime, total
from titanlab.plan.machine import Axis, Machine, axis_of
from titanlab.plan.pipeline_time import Stages, stages_of
from titanlab.plan.stages import placement_of
from titanlab.plan.stages import stages_of as parts_of


class StageTime(NamedTuple):
    """Seconds of one stage for one microbatch: forward, gradients of inputs, gradients of weights."""

    forward: float
    inputs: float
    weights: float


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
        return RankStages(busiest=_stage(times, _Part(times.kind_of, tuple(times.edges))), pipeline=None)
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


class _Part(NamedTuple):
    """The pieces of a stage: kinds of its blocks, and names of the others."""

    kind_of: tuple[int, ...]
    edges: tuple[str, ...]


@functools.lru_cache(maxsize=16384)
def _stage(times: ModelTime, part: _Part) -> RankTime:
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
) -> tuple[tuple[_Part, ...], tuple[int, ...]]:
    """The different stages, and the number in them of each stage."""
    parts, first = [], 0
    for pieces in stages:
        edges = tuple(piece for piece in pieces if not is_in_block(piece))
        blocks = len(pieces) - len(edges)
        # The order of blocks changes no sum.
        parts.append(_Part(tuple(sorted(kind_of[first : first + blocks])), edges))
        first += blocks
    different = list(dict.fromkeys(parts))
    return tuple(different), tuple(map(different.index, parts))


_FIRST = Coordinate()


class Sharding(NamedTuple):
    """FSDP2's communication for some units of one rank, each once.

    Attributes:
        gather, scatter, replicas: seconds of all-gathers, of reduce-scatters, and of HSDP's all-reduces.
        gathered_bytes, scattered_bytes: of the whole tensors, which are copied on the device.
        elements: of parameters that the units have on all ranks that share them.
    """

    gather: float
    scatter: float
    replicas: float
    gathered_bytes: int
    scattered_bytes: int
    elements: int


def seconds_of(rows: Iterable[Row], axis: Axis, machine: Machine) -> float:
    """Time of collectives and messages of one axis."""
    total = 0.0
    for row in rows:
        if row.kind == "recv":
            continue  # the time of a message is counted where it is sent
        hops = {"send": 1, "all_reduce": 2 * (axis.ranks - 1)}.get(row.kind)
        total += machine.collective_seconds(axis, row.wire_bytes, count=row.count, hops=hops)
    return total


def sharding_of(step: Step, pieces: tuple[str, ...], machine: Machine) -> Sharding:
    """FSDP2's communication for some pieces that are one stage."""
    traffic = Traffic()
    add_sharding(step, _FIRST, 0, pieces, traffic)
    rows = traffic.rows()
    layout = step.layout
    experts = expert_axis(layout, "expert_shard", machine.per_node)
    fsdp, replicate = (axis_of(layout, name, per_node=machine.per_node) for name in ("fsdp", "replicate"))
    gathers = [row for row in rows if row.kind == "all_gather"]
    sums = [row for row in rows if row.kind == "all_reduce"]
    scatters = [row for row in rows if row.kind not in ("all_gather", "all_reduce")]
    return Sharding(
        gather=_by_axis(gathers, fsdp, experts, machine),
        scatter=_by_axis(scatters, fsdp, experts, machine),
        replicas=seconds_of(sums, replicate, machine),
        gathered_bytes=sum(row.bytes for row in gathers),
        scattered_bytes=sum(row.bytes for row in scatters),
        elements=parameter_elements(step, _FIRST, pieces),
    )


def _by_axis(rows: Iterable[Row], fsdp: Axis, experts: Axis, machine: Machine) -> float:
    """Time of the collectives of FSDP2, some of which have the ranks that share a part of the experts."""
    rows = list(rows)
    own = [row for row in rows if row.axis == "expert_shard"]
    return seconds_of(own, experts, machine) + seconds_of([row for row in rows if row not in own], fsdp, machine)


def expert_axis(layout: Layout, name: str, per_node: int) -> Axis:
    """The ranks that share experts, `expert`, which are neighbours; or those that share a part, `expert_shard`."""
    ranks, inner = (layout.expert, 1) if name == "expert" else (max(1, layout.expert_shard), layout.expert)
    in_node = max(1, min(ranks, per_node // inner))
    return Axis(ranks=ranks, in_node=in_node, nodes=-(-ranks // in_node))


def exchange_rows(step: Step, piece: str) -> list[Row]:
    """Communication of expert parallelism in the forward pass of one block for one microbatch."""
    traffic = Traffic()
    add_exchange(step, (piece,), traffic, only_forward=True)
    return traffic.rows()


def tensor_rows(step: Step, piece: str) -> tuple[list[Row], list[Row]]:
    """Communication of tensor parallelism in one piece: for each microbatch, and for each step."""
    traffic = Traffic()
    add_tensor(step, (piece,), traffic)
    once = Traffic()
    sum_whole_gradients(step, _FIRST, (piece,), once)
    return traffic.rows(), once.rows()


def context_rows(step: Step, piece: str) -> list[Row]:
    """Communication of context parallelism in one block for one microbatch."""
    traffic = Traffic()
    add_context(step, _FIRST, (piece,), traffic)
    return traffic.rows()


@functools.lru_cache(maxsize=4096)
def axis_in(layout: Layout, name: str, per_node: int) -> Axis:
    """See `axis_of`."""
    return axis_of(layout, name, per_node=per_node)
