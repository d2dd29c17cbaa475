"""The time of an optimizer step of a recipe on a machine, and what it consists of."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titanlab.costs.account import Operation
from titanlab.costs.layout import Layout, hidden_shape
from titanlab.costs.traffic_account import TOTALS_BYTES, gathers
from titanlab.planner.block_time import ModelTime, PieceTime, exposed, model_time, shape_of
from titanlab.planner.exchange import Sharding, axis_in, sharding_of
from titanlab.planner.machine import Machine
from titanlab.planner.model_facts import Key, flops_per_token, key_of, model_facts
from titanlab.planner.pipeline_time import StageTime, pipeline_time
from titanlab.recipe.communication import step_of
from titanlab.recipe.recipe import Recipe
from titanlab.recipe.stage_pieces import stage_pieces

# How often a step reads or writes the gradients outside of the optimizer: for their norm 1, to scale them 2, to set
# them to zero 1.
_GRADIENT_PASSES = 4


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The estimated time of one optimizer step.

    Attributes:
        seconds: of the step.
        parts: seconds by cause; their sum is `seconds`. `compute`; `replicate`, `shard`, `context`, `tensor`,
            `pipeline`: communication of an axis that no computation hides; `bubble`; `optimizer`; `stragglers`.
        tokens_per_second: of one device.
        mfu: model FLOPs utilisation, by `titanlab.costs.flops.per_token` and the peak in the precision of the
            activations, from 0 to 1; nan if the device has no such peak.
    """

    seconds: float
    parts: Mapping[str, float]
    tokens_per_second: float
    mfu: float


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What one stage has: how many blocks of each kind, its edges, and its times for one microbatch."""

    pieces: tuple[PieceTime, ...]
    counts: tuple[int, ...]

    def sum_of(self, name: str) -> float:
        """Sum of one of the times over all pieces."""
        return sum(count * getattr(piece, name) for piece, count in zip(self.pieces, self.counts, strict=True))


def step_time(recipe: Recipe, machine: Machine, *, simulated: bool = False) -> StepTime:
    """Estimate the time of a step.

    Args:
        recipe: resolved.
        machine: as `machine_of` gives it.
        simulated: simulate each action of a pipeline; False: estimate, within 1 % of that, from a shorter simulation
            that recipes share.

    Raises:
        ConfigError: the pipeline's split or schedule does not fit the model or the batch.
    """
    return _Estimate(recipe, machine).step(simulated=simulated)


class _Estimate:
    """The estimate of one recipe."""

    def __init__(self, recipe: Recipe, machine: Machine) -> None:
        self.recipe, self.machine, self.layout = recipe, machine, recipe.layout
        self.model, self.precision = key_of(recipe.model), key_of(recipe.precision)
        self.facts = model_facts(self.model)
        self.formats = recipe.precision.formats()
        shape = shape_of(recipe, machine, self.model, self.precision, key_of(recipe.ac))
        self.times = model_time(shape, recipe)
        self.microbatches = recipe.microbatches
        self.fsdp = self.layout.data_parallelism(mixed=self.formats.mixed) == "fsdp2"
        reshards = recipe.parallelism.frees_after_forward
        self.reshards = reshards and self.fsdp

    def step(self, *, simulated: bool) -> StepTime:
        """The estimate."""
        stages = self._stages()
        parts = dict.fromkeys(("compute", "replicate", "shard", "context", "tensor", "pipeline", "bubble"), 0.0)
        if self.layout.pipeline > 1:
            self._pipeline(stages, parts, simulated=simulated)
        else:
            self._add_stage(stages[0], parts)
        slowest = max(stages, key=lambda stage: sum(stage.counts))
        self._data_parallel(slowest, parts)
        parts["optimizer"] = self._optimizer(slowest)
        world = axis_in(self.layout, "world", self.machine.per_node)
        parts["optimizer"] += self.machine.collective_seconds(world, 2 * TOTALS_BYTES, hops=2 * (world.ranks - 1))
        nodes = world.nodes
        parts["stragglers"] = sum(parts.values()) * self.machine.efficiencies.stragglers * math.log2(nodes)
        seconds = sum(parts.values())
        rate = self.recipe.tokens_per_step / seconds / self.layout.world
        peak = self.machine.peak_flops.get(self.formats.compute, math.nan)
        flops = flops_per_token(self.model, self.recipe.training.seq_len)
        return StepTime(seconds=seconds, parts=parts, tokens_per_second=rate, mfu=rate * flops / peak)

    def _stages(self) -> list[_Stage]:
        """The pieces of each stage."""
        times, layers = self.times, len(self.times.kind_of)
        kinds = len(times.kinds)
        if self.layout.pipeline == 1:
            counts = [times.kind_of.count(kind) for kind in range(kinds)]
            return [_Stage(pieces=(*times.kinds, *times.edges.values()), counts=(*counts, *[1] * len(times.edges)))]
        stages = []
        for first, blocks, edges in _split(self.model, key_of(self.recipe.schedule), key_of(self.recipe.parallelism.split),
                                           self.layout.pipeline, self.recipe.training.seq_len):
            own = times.kind_of[first : first + blocks] if layers else ()
            counts = [own.count(kind) for kind in range(kinds)]
            pieces = [times.edges[name] for name in edges if name in times.edges]
            stages.append(_Stage(pieces=(*times.kinds, *pieces), counts=(*counts, *[1] * len(pieces))))
        return stages

    def _add_stage(self, stage: _Stage, parts: dict[str, float]) -> None:
        """Add computation and exposed communication of all microbatches."""
        count = self.microbatches
        parts["compute"] += count * stage.sum_of("compute")
        for axis in ("tensor", "context"):
            parts[axis] += count * (stage.sum_of(f"{axis}_forward") + stage.sum_of(f"{axis}_backward"))

    def _pipeline(self, stages: Sequence[_Stage], parts: dict[str, float], *, simulated: bool) -> None:
        """Add a pipeline's stages of the busiest rank, its bubble, and what sending adds."""
        recipe, layout = self.recipe, self.layout
        schedule = key_of(recipe.schedule)
        durations = [
            StageTime(stage.sum_of("ahead"), stage.sum_of("back") - stage.sum_of("weights"), stage.sum_of("weights"))
            for stage in stages
        ]
        transfer = self._transfer()
        whole = pipeline_time(
            schedule, durations, ranks=layout.pipeline, microbatches=self.microbatches, transfer=transfer,
            simulated=simulated,
        )
        without = pipeline_time(
            schedule, durations, ranks=layout.pipeline, microbatches=self.microbatches, transfer=0.0,
            simulated=simulated,
        )
        placement = recipe.schedule.placement(ranks=layout.pipeline)
        busy = [0.0] * layout.pipeline
        for stage, rank in enumerate(placement):
            busy[rank] += sum(durations[stage])
        busiest = busy.index(max(busy))
        for stage, rank in zip(stages, placement, strict=True):
            if rank == busiest:
                self._add_stage(stage, parts)
        parts["pipeline"] += max(0.0, whole.seconds - without.seconds)
        parts["bubble"] += max(0.0, without.seconds - without.busy)

    def _transfer(self) -> float:
        """Time to send a hidden state to the next stage."""
        shape = hidden_shape(
            self.layout,
            microbatch=self.recipe.microbatch,
            seq_len=self.recipe.training.seq_len,
            dim=self.facts.account.dim,
            sequence_parallel=self.recipe.parallelism.sequence_parallel,
        )
        axis = axis_in(self.layout, "pipeline", self.machine.per_node)
        return self.machine.collective_seconds(axis, math.prod(shape) * self.formats.compute_bytes, hops=1)

    def _data_parallel(self, stage: _Stage, parts: dict[str, float]) -> None:
        """Add what summing gradients and gathering parameters adds."""
        if not self.fsdp:
            if self.layout.replicate > 1:
                self._ddp(stage, parts)
            return
        block, edges = self._unit((self.facts.block,)), self._unit((*self.facts.before, *self.facts.after))
        machine = self.machine
        blocks = sum(stage.counts[: len(self.times.kinds)])
        ahead, back = self._mean_block(stage)
        # In a step each block is gathered once, or for each forward and each backward pass.
        passes = self.microbatches if self.reshards else 1
        gather, scatter, replicas = block.gather, block.scatter, block.replicas
        copies = self._copies(block)
        per_pass = exposed(ahead, gather, machine) + (exposed(back, gather, machine) if self.reshards else 0.0)
        gathered = passes * (2 if self.reshards else 1)
        last = exposed(back, scatter + replicas + (gather if self.reshards else 0.0), machine)
        first = edges.gather + block.gather
        shard = blocks * (passes * per_pass - (exposed(back, gather, machine) if self.reshards else 0.0) + last) + first
        # The reductions of the first block and of the edges have no computation after them.
        shard += scatter + edges.scatter
        tail = replicas + edges.replicas
        # Exposed time of reductions and of gathers is not told apart except in their shares.
        summed = gather + scatter + replicas
        share = replicas / summed if summed else 0.0
        parts["replicate"] += share * blocks * last + tail
        parts["shard"] += shard - share * blocks * last
        parts["compute"] += blocks * (gathered * copies[0] + copies[1]) + copies[2]

    def _copies(self, block: Sharding) -> tuple[float, float, float]:
        """Seconds to cast and copy around collectives: for a gather of a block, its reduction, and the edges."""
        if self.layout.fsdp == 1 and not self.formats.mixed:
            return 0.0, 0.0, 0.0
        rate = self.machine.memory_bytes_per_second * self.machine.efficiencies.fused_memory
        edges = self._unit((*self.facts.before, *self.facts.after))
        cast = (self.formats.master_bytes + self.formats.compute_bytes) / self.layout.fsdp
        reduce = self.formats.compute_bytes + self.formats.reduce_bytes

        def gather(unit: Sharding) -> float:
            return (2 * unit.gathered_bytes + unit.elements * cast) / rate

        return gather(block), block.elements * reduce / rate, gather(edges) + edges.elements * reduce / rate

    def _mean_block(self, stage: _Stage) -> tuple[float, float]:
        """Forward and backward of a block, as the mean over those of a stage."""
        kinds = len(self.times.kinds)
        count = max(1, sum(stage.counts[:kinds]))
        pairs = list(zip(stage.pieces[:kinds], stage.counts[:kinds], strict=True))
        ahead = sum(number * piece.ahead for piece, number in pairs) / count
        return ahead, sum(number * piece.back for piece, number in pairs) / count

    def _ddp(self, stage: _Stage, parts: dict[str, float]) -> None:
        """Buckets are summed while the backward of the last microbatch runs; the last bucket is exposed."""
        axis = axis_in(self.layout, "replicate", self.machine.per_node)
        size = self.facts.account.parameter_count * self.formats.master_bytes
        wire = 2 * size * (axis.ranks - 1) / axis.ranks
        buckets = max(1.0, size / (25 * 2**20))
        whole = self.machine.collective_seconds(axis, wire, count=buckets, hops=2 * (axis.ranks - 1))
        back = stage.sum_of("back")
        parts["replicate"] += exposed(back, whole * (1 - 1 / buckets), self.machine) + whole / buckets

    def _optimizer(self, stage: _Stage) -> float:
        """Time to read and write parameters, gradients and states, on the rank with the most parameters."""
        block, edges = self._unit((self.facts.block,)), self._unit((*self.facts.before, *self.facts.after))
        blocks = sum(stage.counts[: len(self.times.kinds)])
        shards = self.layout.fsdp if self.fsdp else 1
        elements = (blocks * block.elements + edges.elements) / shards
        master = self.formats.master_bytes
        # Parameters and both averages are read and written, gradients are read.
        moved = elements * master * (2 * 3 + 1 + _GRADIENT_PASSES)
        return moved / (self.machine.memory_bytes_per_second * self.machine.efficiencies.fused_memory)

    def _unit(self, pieces: tuple[str, ...]) -> Sharding:
        return _units(
            self.model, self.precision, self.layout, self.machine, pieces, _Recipe(self.recipe),
        )


class _Recipe:
    """A recipe that a cache does not look at: the rest of the key decides."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Recipe)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=16384)
def _units(
    model: Key, precision: Key, layout: Layout, machine: Machine, pieces: tuple[str, ...], recipe: _Recipe
) -> Sharding:
    step = step_of(recipe.recipe, account=model_facts(model).sample)
    return sharding_of(step, pieces, machine)


@functools.lru_cache(maxsize=16384)
def _split(
    model: Key, schedule: Key, split: Key, ranks: int, seq_len: int
) -> list[tuple[int, int, tuple[str, ...]]]:
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
