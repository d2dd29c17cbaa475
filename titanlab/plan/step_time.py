"""The time of an optimizer step of a recipe on a machine, and its parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from titanlab.costs import (
    TOTALS_BYTES,
    Coordinate,
    Step,
    TrafficRow,
    add_sharding,
    hidden_shape,
    parameter_elements,
    training_flops_per_token,
)
from titanlab.plan.block_time import exposed, model_time, rows_of, seconds_of
from titanlab.plan.machine import AxisPlacement, Machine, axis_of
from titanlab.plan.memory import stored_pieces
from titanlab.plan.pipeline_time import PipelineEstimate, RankTime, Stages, least_time, pipeline_time, rank_stages
from titanlab.plan.stages import Seen, model_facts
from titanlab.recipe import Recipe, step_of

# How often a step reads or writes the gradients outside of the optimizer: norm 1, scaling 2, zeroing 1.
_GRADIENT_PASSES = 4


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The estimated time of one optimizer step.

    Attributes:
        parts: seconds by cause; their sum is `seconds`. `compute`; `replicate`, `shard`, `context`, `tensor`,
            `pipeline`: communication of an axis that no computation hides; `bubble`; `optimizer`; `stragglers`.
        mfu: model FLOPs utilisation, by `titanlab.costs.training_flops_per_token` and the peak in the precision of the
            activations, from 0 to 1; nan if the device has no such peak.
    """

    seconds: float
    parts: Mapping[str, float]
    tokens_per_second: float
    mfu: float


def step_time(recipe: Recipe, machine: Machine, *, pipeline: PipelineEstimate = pipeline_time) -> StepTime:
    """Estimate the time of a step.

    Args:
        pipeline: gives the time of a pipeline. `simulated_time` simulates each action; `pipeline_time` is within 1 % of
            that, from a shorter simulation that recipes share; `least_time` is a bound.

    Raises:
        ConfigError: the pipeline's split or schedule does not fit the model or the batch.
    """
    return _Estimate(recipe, machine).step(pipeline)


def least_seconds(recipe: Recipe, machine: Machine) -> float:
    """A lower bound of the seconds of a step, the same for all recipes that differ only in `replicate` and `shard`.

    Includes the blocks, the pipeline's bound and the stragglers, but not data parallelism and the optimizer.

    Raises:
        ConfigError: as `step_time`.
    """
    return _Estimate(recipe, machine).least()


class _Estimate:
    def __init__(self, recipe: Recipe, machine: Machine) -> None:
        self.recipe, self.machine, self.layout = recipe, machine, recipe.layout
        self.model, self.precision = recipe.model, recipe.precision
        self.facts = model_facts(self.model)
        self.formats = recipe.precision.formats()
        self.times = model_time(recipe, machine)
        self.microbatches = recipe.microbatches
        self.fsdp = self.layout.data_parallelism(mixed=self.formats.mixed) == "fsdp2"
        self.reshards = recipe.parallelism.frees_after_forward and self.fsdp

    def least(self) -> float:
        parts, _ = self._blocks(least_time)
        seconds = sum(parts.values())
        return seconds + self._straggling(seconds)

    def step(self, pipeline: PipelineEstimate) -> StepTime:
        recipe, machine, layout = self.recipe, self.machine, self.layout
        parts, busiest = self._blocks(pipeline)
        self._data_parallel(busiest, parts)
        parts["optimizer"] = self._optimizer(busiest)
        world = self._world
        parts["optimizer"] += machine.collective_seconds(world, 2 * TOTALS_BYTES, hops=2 * (world.ranks - 1))
        parts["stragglers"] = self._straggling(sum(parts.values()))
        seconds = sum(parts.values())
        tokens = recipe.training.global_batch * recipe.training.seq_len
        rate = tokens / seconds / layout.world
        peak = machine.peak_flops.get(self.formats.compute, math.nan)
        flops = training_flops_per_token(self.facts.account, seq_len=recipe.training.seq_len)
        return StepTime(seconds=seconds, parts=parts, tokens_per_second=rate, mfu=rate * flops / peak)

    @property
    def _world(self) -> AxisPlacement:
        return axis_of(self.layout, "world", self.machine.per_node)

    def _straggling(self, seconds: float) -> float:
        # The slowest node delays all: the maximum of n equally distributed times grows with the logarithm of n.
        return seconds * self.machine.efficiencies.stragglers * math.log2(self._world.nodes)

    def _blocks(self, pipeline: PipelineEstimate) -> tuple[dict[str, float], RankTime]:
        """The parts of a step for its blocks and its pipeline, and the sums of the busiest rank."""
        recipe = self.recipe
        stages = rank_stages(
            self.times, self.model, recipe.schedule, recipe.parallelism.split, self.layout.pipeline,
            recipe.training.seq_len,
        )  # fmt: skip
        busiest = stages.busiest
        parts = {
            "compute": self.microbatches * busiest.compute,
            "replicate": 0.0,
            "shard": 0.0,
            "context": self.microbatches * busiest.context,
            "tensor": self.microbatches * busiest.tensor,
            "pipeline": 0.0,
            "bubble": 0.0,
        }
        if stages.pipeline is not None:
            self._pipeline(pipeline, stages.pipeline, parts)
        parts["tensor"] += busiest.blocks * self.times.once
        return parts, busiest

    def _pipeline(self, pipeline: PipelineEstimate, stages: Stages, parts: dict[str, float]) -> None:
        """Add a pipeline's bubble, and the time to send hidden states."""
        shape = hidden_shape(
            self.layout,
            microbatch=self.recipe.microbatch,
            seq_len=self.recipe.training.seq_len,
            dim=self.facts.account.dim,
            sequence_parallel=self.recipe.parallelism.sequence_parallel,
        )
        bytes_sent = math.prod(shape) * self.formats.compute_bytes
        axis = axis_of(self.layout, "pipeline", self.machine.per_node)
        transfer = self.machine.collective_seconds(axis, bytes_sent, hops=1)
        estimate = pipeline(self.recipe.schedule, stages, self.layout.pipeline, self.microbatches, transfer)
        parts["pipeline"] = estimate.sending
        parts["bubble"] = max(0.0, estimate.seconds - estimate.sending - stages.busy * self.microbatches)

    def _data_parallel(self, stage: RankTime, parts: dict[str, float]) -> None:
        """Add the exposed time to sum gradients and gather parameters."""
        machine, blocks = self.machine, stage.blocks
        if not self.fsdp:
            if self.layout.replicate > 1:
                # Buckets are summed while the backward of the last microbatch runs; the last bucket is exposed.
                axis = axis_of(self.layout, "replicate", machine.per_node)
                size = self.facts.account.parameter_count * self.formats.master_bytes
                wire = 2 * size * (axis.ranks - 1) / axis.ranks
                buckets = max(1.0, size / (25 * 2**20))
                whole = machine.collective_seconds(axis, wire, count=buckets, hops=2 * (axis.ranks - 1))
                back = stage.time.inputs + stage.time.weights
                parts["replicate"] += exposed(back, whole * (1 - 1 / buckets), machine) + whole / buckets
            return
        block, edges = self._unit((self.facts.block,)), self._unit(stage.edges)
        ahead, back = stage.block_forward / max(1, blocks), stage.block_backward / max(1, blocks)
        freed, kept = freed_and_kept(blocks, reshards=self.reshards)
        gather, reduce = block.gather, block.scatter + block.replicas
        ahead_exposed, back_exposed = exposed(ahead, gather, machine), exposed(back, gather, machine)
        # The next forward hides a gather, and the backward hides the gather of the block before and the reduction of
        # the block after. Reductions run in the backward of the last microbatch only.
        hidden = freed * (self.microbatches * ahead_exposed + (self.microbatches - 1) * back_exposed)
        hidden += freed * exposed(back, gather + reduce, machine)
        hidden += kept * (ahead_exposed + exposed(back, reduce, machine))
        # No computation hides the first gathers and the last reductions.
        share = block.replicas / (gather * (1 + (freed > 0)) + reduce) if reduce else 0.0
        parts["replicate"] += share * hidden + block.replicas + edges.replicas
        parts["shard"] += (1 - share) * hidden + edges.gather + gather + block.scatter + edges.scatter
        if self.layout.fsdp == 1 and not self.formats.mixed:
            return
        # Casts and copies around collectives.
        gathers = 2 * self.microbatches * freed + kept
        rate = machine.memory_bytes_per_second * machine.efficiencies.fused_memory
        cast = (self.formats.master_bytes + self.formats.compute_bytes) / self.layout.fsdp
        reduced = self.formats.compute_bytes + self.formats.reduce_bytes
        gather_block, gather_edges = (
            (2 * unit.gathered_bytes + unit.elements * cast) / rate for unit in (block, edges)
        )
        reduce_block, reduce_edges = (unit.elements * reduced / rate for unit in (block, edges))
        parts["compute"] += gathers * gather_block + blocks * reduce_block + (gather_edges + reduce_edges)

    def _optimizer(self, rank: RankTime) -> float:
        """Time to read and write parameters, gradients and states, on the busiest rank."""
        optimizer, shards = self.recipe.optimizer, self.layout.fsdp if self.fsdp else 1
        pieces = stored_pieces(self.model, self.precision, optimizer, self.layout.tensor, shards, self.layout.expert)
        block = pieces[self.facts.block]
        others = [pieces[name] for name in rank.edges]
        parameters = rank.blocks * block.parameters + sum(piece.parameters for piece in others)
        states = rank.blocks * block.optimizer + sum(piece.optimizer for piece in others)
        # Gradients have the size of the parameters.
        moved = 2 * (parameters + states) + (1 + _GRADIENT_PASSES) * parameters
        return moved / (self.machine.memory_bytes_per_second * self.machine.efficiencies.fused_memory)

    def _unit(self, pieces: tuple[str, ...]) -> ShardingTraffic:
        return _sharding(Seen((self.model, self.precision, self.layout), self.recipe), self.machine, pieces)


def freed_and_kept(blocks: int, *, reshards: bool) -> tuple[int, int]:
    """How many blocks of a stage free their gathered parameters between forward and backward, and how many keep them.

    The last block keeps them, because its backward follows at once: see `titanlab.costs.traffic_account.add_sharding`.
    """
    freed = max(0, blocks - 1) if reshards else 0
    return freed, blocks - freed


class ShardingTraffic(NamedTuple):
    """FSDP2's communication for some units of one rank, each once.

    Attributes:
        gather, scatter, replicas: seconds of all-gathers, of reduce-scatters, and of HSDP's all-reduces.
        gathered_bytes, scattered_bytes: of the whole tensors, which are copied on the device.
        elements: parameters of the units, over all ranks that share them.
    """

    gather: float
    scatter: float
    replicas: float
    gathered_bytes: int
    scattered_bytes: int
    elements: int


def sharding_of(step: Step, pieces: tuple[str, ...], machine: Machine) -> ShardingTraffic:
    """FSDP2's communication for the pieces of one stage."""
    rows, layout = rows_of(add_sharding, step, Coordinate(), 0, pieces), step.layout
    fsdp, replicate = (axis_of(layout, name, machine.per_node) for name in ("fsdp", "replicate"))
    experts = axis_of(layout, "expert_shard", machine.per_node)
    gathers = [row for row in rows if row.kind == "all_gather"]
    scatters = [row for row in rows if row.kind not in ("all_gather", "all_reduce")]

    def seconds(rows: list[TrafficRow]) -> float:
        # Some collectives have only the ranks that share a part of the experts.
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
    step = step_of(seen.recipe, account=model_facts(seen.recipe.model).sample)
    return sharding_of(step, pieces, machine)
