"""The time of an optimizer step of a recipe on a machine, and its parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from titanlab.costs import (
    TOTALS_BYTES,
    Coordinate,
    Step,
    TrafficRow,
    add_sharding,
    is_in_block,
    parameter_elements,
    training_flops_per_token,
)
from titanlab.plan.block_time import exposed, model_time, rows_of, seconds_of
from titanlab.plan.machine import Machine, axis_of
from titanlab.plan.memory import PieceBytes, stored_pieces
from titanlab.plan.pipeline_time import PipelineEstimate, RankTime, pipeline_time, rank_stages
from titanlab.plan.stages import Seen, message_bytes, model_facts
from titanlab.recipe import Recipe, step_of

# Reads and writes of all gradients in a step, outside of the optimizer. Always: one read for the norm, one write of
# zeros. Where gradients are scaled: one more read and one more write.
_GRADIENT_PASSES, _SCALING_PASSES = 2, 2


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The estimated time of one optimizer step.

    Attributes:
        parts: seconds by cause; their sum is `seconds`. `compute`; `replicate`, `shard`, `context`, `tensor`,
            `pipeline`: exposed communication of the axis, with the host's time for it and the copies that it needs;
            `bubble`; `optimizer`; `stragglers`.
        mfu: model FLOPs utilisation, by `titanlab.costs.training_flops_per_token` and the peak in the precision of the
            activations, from 0 to 1; nan if the device has no such peak.
    """

    seconds: float
    parts: Mapping[str, float]
    tokens_per_second: float
    mfu: float


# Seconds of a step by part, without data parallelism and optimizer; and the sums over the busiest rank's pieces.
BlocksTime = tuple[dict[str, float], RankTime]


def step_time(
    recipe: Recipe,
    machine: Machine,
    *,
    pipeline: PipelineEstimate = pipeline_time,
    blocks: BlocksTime | None = None,
) -> StepTime:
    """Estimate the time of a step.

    Args:
        pipeline: gives the time of a pipeline. `simulated_time` simulates each action. `pipeline_time` is within 1 % of
            it, from a shorter simulation that recipes share. `least_time` is a lower bound.
        blocks: what `blocks_time` returns, if it is known.

    Raises:
        ConfigError: the pipeline's split or schedule does not fit the model or the batch.
    """
    formats = recipe.precision.formats()
    fsdp = recipe.layout.data_parallelism(mixed=formats.mixed) == "fsdp2"
    known, busiest = blocks or blocks_time(recipe, machine, pipeline)
    parts = dict(known)
    # The optimizer reads and writes trained parameters, gradients (which have the size of the parameters) and states.
    pieces = stored_pieces(
        *(recipe.model, recipe.precision, recipe.optimizer, recipe.layout.tensor),
        *(recipe.layout.fsdp if fsdp else 1, recipe.layout.expert, recipe.training.freeze),
    )
    block, others = pieces[model_facts(recipe.model).block], [pieces[name] for name in busiest.edges]
    if recipe.training.freeze:
        # Blocks may have different frozen parameters: take the mean block for each.
        blocks_of = [piece for name, piece in pieces.items() if is_in_block(name)]
        block = PieceBytes(*(sum(column) // len(blocks_of) for column in zip(*blocks_of, strict=True)))
    parameters = busiest.blocks * block.trained + sum(piece.trained for piece in others)
    if fsdp:
        _add_fsdp(recipe, machine, busiest, parts)
    else:
        _add_whole_gradients(recipe, machine, busiest, parameters, parts)
    states = busiest.blocks * block.optimizer + sum(piece.optimizer for piece in others)
    # Without clipping the factor is 1: a CPU skips the scaling; a GPU scales, as its host does not read the factor.
    scales = recipe.training.max_grad_norm is not None or recipe.cluster.accelerator != "cpu"
    passes = _GRADIENT_PASSES + _SCALING_PASSES * scales
    moved = 2 * (parameters + states) + (1 + passes) * parameters
    world = axis_of(recipe.layout, "world", machine.per_node)
    parts["optimizer"] = moved / (machine.memory_bytes_per_second * machine.efficiencies.fused_memory)
    update_flops = busiest.blocks * block.update_flops + sum(piece.update_flops for piece in others)
    parts["optimizer"] += update_flops / machine.flops_per_second("bfloat16")
    parts["optimizer"] += machine.tree_seconds(world, TOTALS_BYTES)
    parts["stragglers"] = _straggling(recipe, machine, sum(parts.values()))
    seconds = sum(parts.values())
    tokens = recipe.training.global_batch * recipe.training.seq_len
    rate = tokens / seconds / recipe.layout.world
    peak = machine.peak_flops.get(formats.compute, math.nan)
    flops = training_flops_per_token(recipe.account, seq_len=recipe.training.seq_len)
    return StepTime(seconds=seconds, parts=parts, tokens_per_second=rate, mfu=rate * flops / peak)


def least_seconds(recipe: Recipe, machine: Machine, blocks: BlocksTime) -> float:
    """A lower bound of a step's seconds, which is the same for recipes that differ only in `replicate` and `shard`.

    It contains `blocks` and stragglers, but neither data parallelism nor the optimizer.
    """
    seconds = sum(blocks[0].values())
    return seconds + _straggling(recipe, machine, seconds)


def _straggling(recipe: Recipe, machine: Machine, seconds: float) -> float:
    # All nodes wait for the slowest: the maximum of n equally distributed times grows with the logarithm of n.
    nodes = axis_of(recipe.layout, "world", machine.per_node).nodes
    return seconds * machine.efficiencies.stragglers * math.log2(nodes)


def blocks_time(recipe: Recipe, machine: Machine, estimate: PipelineEstimate) -> BlocksTime:
    """Seconds of a step without data parallelism and optimizer. Only the product of `replicate` and `shard` matters.

    Raises:
        ConfigError: as `step_time`.
    """
    layout, schedule, microbatches = recipe.layout, recipe.schedule, recipe.microbatches
    times = model_time(recipe, machine)
    busiest, stages = rank_stages(times, schedule, recipe.parallelism.split, layout.pipeline)
    whole = busiest.whole
    parts = {
        "compute": microbatches * whole.compute,
        "replicate": 0.0,
        "shard": 0.0,
        "context": microbatches * (whole.context_forward + whole.context_backward),
        "tensor": microbatches * (whole.tensor_forward + whole.tensor_backward) + busiest.blocks * times.once,
        "pipeline": 0.0,
        "bubble": 0.0,
    }
    if stages is not None:
        axis = axis_of(layout, "pipeline", machine.per_node)
        transfer = machine.collective_seconds(axis, message_bytes(recipe), hops=1)
        piped = estimate(schedule, stages, layout.pipeline, microbatches, transfer)
        parts["pipeline"] = piped.sending
        parts["bubble"] = max(0.0, piped.seconds - piped.sending - stages.busy * microbatches)
    return parts, busiest


def _add_whole_gradients(
    recipe: Recipe, machine: Machine, stage: RankTime, parameters: int, parts: dict[str, float]
) -> None:
    """Add to `parts` the time to accumulate gradients of microbatches, and the exposed time of DDP's all-reduces.

    Args:
        parameters: bytes of the rank's stored parameters that are trained.
    """
    parts["compute"] += (recipe.microbatches - 1) * parameters * 3 / _eager(machine)
    if recipe.layout.replicate > 1:
        # DDP sums buckets while the last microbatch's backward runs; the sum of the last bucket is exposed.
        axis = axis_of(recipe.layout, "replicate", machine.per_node)
        size = model_facts(recipe.model).account.parameter_count * recipe.precision.formats().master_bytes
        wire = 2 * size * (axis.ranks - 1) / axis.ranks
        buckets = max(1.0, size / (25 * 2**20))
        summing = machine.collective_seconds(axis, wire, count=buckets, hops=2 * (axis.ranks - 1))
        parts["replicate"] += exposed(stage.whole.back, summing * (1 - 1 / buckets), machine) + summing / buckets


def _add_fsdp(recipe: Recipe, machine: Machine, stage: RankTime, parts: dict[str, float]) -> None:
    """Add to `parts` the time to accumulate gradients, and FSDP2's exposed time to reduce and to gather."""
    layout, formats, blocks = recipe.layout, recipe.precision.formats(), stage.blocks
    facts, microbatches = model_facts(recipe.model), recipe.microbatches
    # The degree of the pipeline, the outermost axis, does not change the times of a unit: it is not in the key.
    degrees = (layout.replicate, layout.shard, layout.context, layout.tensor, layout.expert)
    seen = Seen((recipe.model, recipe.precision, recipe.cluster.accelerator, *degrees), recipe)
    block, edges = _sharding(seen, machine, (facts.block,)), _sharding(seen, machine, stage.edges)
    ahead, back = stage.own.ahead / max(1, blocks), stage.own.back / max(1, blocks)
    # The last blocks stay gathered: see `titanlab.costs.traffic_account.add_sharding`.
    freed = recipe.parallelism.freed_blocks(blocks)
    kept = blocks - freed
    gather, reduce = block.gather, block.scatter + block.replicas
    # Host time of FSDP2's hooks: for a gather in the forward pass, a gather and a reduction in the backward pass. The
    # device waits for hooks that do not fit into the host's idle time while the device computes.
    hook, own = machine.efficiencies.hook_seconds, stage.own
    late = max(0.0, blocks * hook - own.ahead + own.host_forward) + max(
        0.0, 2 * blocks * hook - own.back + own.host_backward
    )
    parts["shard"] += microbatches * late
    ahead_exposed, back_exposed = exposed(ahead, gather, machine), exposed(back, gather, machine)
    # Number of microbatches after which gradients are reduced, without the last microbatch.
    more = microbatches - 1 if recipe.reduces_each else 0
    # A block's gather overlaps the forward of the block before it. A block's backward overlaps the gather of the block
    # before it and the reduction of the block after it.
    hidden = freed * (microbatches * ahead_exposed + (microbatches - 1 - more) * back_exposed)
    hidden += freed * (exposed(back, gather + reduce, machine) + more * exposed(back, gather + block.scatter, machine))
    hidden += kept * (ahead_exposed + exposed(back, reduce, machine) + more * exposed(back, block.scatter, machine))
    # A microbatch's last reductions overlap the next microbatch's forward. In a pipeline other pieces reduce only once.
    more_edges = more if layout.pipeline == 1 else 0
    ends = block.scatter + edges.scatter * (more_edges > 0)
    hidden += more * exposed(stage.whole.ahead, ends, machine)
    # No computation overlaps the first gathers and the last reductions of a step.
    share = block.replicas / (gather * (1 + (freed > 0)) + reduce) if reduce else 0.0
    parts["replicate"] += share * hidden + block.replicas + edges.replicas
    parts["shard"] += (1 - share) * hidden + edges.gather + gather + block.scatter + edges.scatter
    # Gradients that are not reduced after each microbatch are added to unsharded sums, in the dtype of the reduction.
    summed = (microbatches - 1 - more) * blocks * block.elements + (microbatches - 1 - more_edges) * edges.elements
    parts["compute"] += summed * (formats.compute_bytes + 2 * formats.reduce_bytes) / _eager(machine)
    if layout.fsdp == 1 and not formats.mixed:
        return
    # Add the casts and copies before and after collectives.
    gathers = 2 * microbatches * freed + kept
    rate = machine.memory_bytes_per_second * machine.efficiencies.fused_memory
    # A cast to float8 has separate kernels before it, which multiply by the scale and clamp.
    gathers_float8 = recipe.precision.float8_gathered(facts.sample)
    moved = 5 * formats.master_bytes + 1 if gathers_float8 else formats.master_bytes + formats.compute_bytes
    cast = moved / layout.fsdp
    reduced = formats.compute_bytes + formats.reduce_bytes
    gather_block, gather_edges = ((2 * unit.gathered_bytes + unit.elements * cast) / rate for unit in (block, edges))
    reduce_block, reduce_edges = (unit.elements * reduced / rate for unit in (block, edges))
    parts["compute"] += gathers * gather_block + gather_edges
    parts["compute"] += (1 + more) * blocks * reduce_block + (1 + more_edges) * reduce_edges


def _eager(machine: Machine) -> float:
    """Bytes per second that kernels of separate operations move."""
    return machine.memory_bytes_per_second * machine.efficiencies.eager_memory


class ShardingTraffic(NamedTuple):
    """FSDP2's communication for some of the pieces (FSDP units) of one rank, each gathered and reduced once.

    Attributes:
        gather, scatter, replicas: seconds of all-gathers, of reduce-scatters, and of HSDP's all-reduces.
        gathered_bytes, scattered_bytes: bytes of the unsharded tensors, which the device also copies.
        elements: number of parameters in the pieces before FSDP2 shards them.
    """

    gather: float
    scatter: float
    replicas: float
    gathered_bytes: int
    scattered_bytes: int
    elements: int


def sharding_of(step: Step, pieces: tuple[str, ...], machine: Machine) -> ShardingTraffic:
    """FSDP2's communication for the pieces of one stage, whose gradients are reduced once."""
    rows, layout = rows_of(add_sharding, step, Coordinate(), 0, pieces), step.layout
    fsdp, replicate = (axis_of(layout, name, machine.per_node) for name in ("fsdp", "replicate"))
    experts = axis_of(layout, "expert_shard", machine.per_node)
    gathers = [row for row in rows if row.kind == "all_gather"]
    scatters = [row for row in rows if row.kind not in ("all_gather", "all_reduce")]

    def seconds(rows: list[TrafficRow]) -> float:
        # The collectives of experts run among the ranks that share a part of the experts.
        own = [row for row in rows if row.axis == "expert_shard"]
        return seconds_of(own, experts, machine) + seconds_of([row for row in rows if row not in own], fsdp, machine)

    return ShardingTraffic(
        gather=seconds(gathers),
        scatter=seconds(scatters),
        replicas=seconds_of([row for row in rows if row.kind == "all_reduce"], replicate, machine),
        gathered_bytes=sum(row.bytes for row in gathers),
        scattered_bytes=sum(row.bytes for row in scatters),
        elements=parameter_elements(step, Coordinate(), pieces),
    )


@functools.lru_cache(maxsize=16384)
def _sharding(seen: Seen, machine: Machine, pieces: tuple[str, ...]) -> ShardingTraffic:
    recipe = seen.recipe
    layout = replace(recipe.layout, pipeline=1)
    step = replace(step_of(recipe, account=model_facts(recipe.model).sample), layout=layout, reduces_each=False)
    return sharding_of(step, pieces, machine)
