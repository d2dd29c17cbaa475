"""The memory that each rank of a pipeline needs, item by item, and the memory that it reserves on its device.

The bytes of parameters, gradients and optimizer state are exact; the policies of checkpointing declare the bytes of
saved activations. The rest is estimated from how FSDP2, autograd, the loss and the allocator work.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from titanlab.costs import (
    Activation,
    Coordinate,
    Layout,
    Operation,
    Share,
    account_for,
    chunk_bytes,
    cuts_of,
    gathered_part,
    hidden_shape,
    is_in_block,
    kept_activations,
    step_traffic,
    stored_part,
)
from titanlab.plan.machine import Machine
from titanlab.plan.pipeline_time import shorter
from titanlab.plan.stages import (
    actions_of,
    block_operations,
    edge_operations,
    model_facts,
    parts_of,
    placement_of,
    stages_of,
    treatments,
)
from titanlab.recipe import Recipe, step_of
from titanlab.techniques.ac.contract import ACConfig
from titanlab.techniques.model.contract import ModelConfig
from titanlab.techniques.optimizer.contract import OptimizerConfig, Stored
from titanlab.techniques.precision.contract import PrecisionConfig, matched
from titanlab.techniques.schedule.action import Kind
from titanlab.techniques.schedule.contract import PipelineSchedule

ITEMS = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered parameters",
    "unreduced gradients",
    "activations",
    "backward of a block",
    "logits and loss",
    "communication buffers",
)
# Gathered blocks at one moment, if blocks are freed after use: the one that computes, and the next one.
_GATHERED_BLOCKS = 2
# FSDP2 gathers into a separate buffer, and copies the parameters out of it.
_GATHER_BUFFERS = 1
# Symmetric memory keeps its buffers: for two gathers that run at once, and for the input of a reduction.
_SYMMETRIC_GATHERS = 2
# Blocks whose gradients exist in the precision of the reduction: the one that is being sent, and the one before.
_REDUCED_BLOCKS = 2
# Bytes of a number in float32.
_FLOAT = 4
# As a limit on bytes of activations: more than any rank keeps, so all kept activations count.
_ALL_KEPT = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one rank of a pipeline at the moment of a step when it is largest.

    Attributes:
        moment: `loss`, `backward` (its first block, when all activations exist), `end` (of the backward pass, when all
            gradients exist) or `optimizer`.
        items: bytes by name, in the order of `ITEMS`.
    """

    rank: int
    moment: str
    items: Mapping[str, int]

    @property
    def allocated(self) -> int:
        return sum(self.items.values())


def memory(recipe: Recipe) -> tuple[RankMemory, ...]:
    """The memory of each rank of a resolved recipe's pipeline.

    Raises:
        ConfigError: the pipeline's split or schedule does not fit the model or the batch.
    """
    return _Ranks(recipe).memory()


def most_memory(recipe: Recipe) -> RankMemory:
    return max(memory(recipe), key=lambda rank: rank.allocated)


class _Ranks:
    def __init__(self, recipe: Recipe) -> None:
        layout, formats, config = recipe.layout, recipe.precision.formats(), recipe.parallelism
        self.recipe, self.layout, self.config = recipe, layout, config
        self.model, self.schedule = recipe.model, recipe.schedule
        self.account = model_facts(self.model).account
        self.sums = layout.data_parallelism(mixed=formats.mixed)
        shards = layout.fsdp if self.sums == "fsdp2" else 1
        self.pieces = stored_pieces(
            self.model, recipe.precision, recipe.optimizer, layout.tensor, shards, layout.expert
        )
        self.share = Share(
            element_bytes=formats.compute_bytes,
            accelerator=recipe.cluster.accelerator,
            tensor=layout.tensor,
            context=layout.context,
            sequence_parallel=config.sequence_parallel,
            expert=layout.expert,
        )
        self.shape = (self.model, self.share, recipe.microbatch, recipe.training.seq_len)
        kinds, kind_of = block_bytes(recipe.ac, *self.shape)
        self.blocks = tuple(kinds[kind] for kind in kind_of)
        self.edges = edge_bytes(*self.shape)
        self.stages = stages_of(self.model, self.schedule, config.split, layout.pipeline, recipe.training.seq_len)
        self.parts = tuple(map(parts_of, self.stages))
        shape = hidden_shape(
            layout,
            microbatch=recipe.microbatch,
            seq_len=recipe.training.seq_len,
            dim=self.account.dim,
            sequence_parallel=config.sequence_parallel,
        )
        self.hidden = shape[0] * shape[1] * shape[2] * formats.compute_bytes

    def memory(self) -> tuple[RankMemory, ...]:
        placement = placement_of(self.schedule, self.layout.pipeline)
        memories = []
        # Stages with pieces that are alike need the same; a pipeline has few different ones.
        kinds = [(*map(self.blocks.__getitem__, parts.blocks), *parts.edges) for parts in self.parts]
        known: dict[object, dict[str, dict[str, int]]] = {}
        saved = list(map(self.saved, range(len(placement))))
        known_deferred = deferred_bytes(*self.shape)
        if self.recipe.loss_chunk:
            # The forward pass of the loss has already computed the gradient of the head's weight.
            known_deferred = {**known_deferred, self.account.head: 0}
        deferred = [
            len(parts.blocks) * known_deferred[""] + sum([known_deferred.get(piece, 0) for piece in parts.edges])
            for parts in self.parts
        ]
        for rank in range(self.layout.pipeline):
            stages = [number for number, owner in enumerate(placement) if owner == rank]
            kept = self._kept(rank, [saved[number] for number in stages], [deferred[number] for number in stages])
            key = tuple(kinds[number] for number in stages)
            if key not in known:
                known[key] = self._moments(stages)
            sums = {}
            for moment, items in known[key].items():
                items = {**items, "activations": min(kept, items["activations"])}
                sums[moment] = {name: items.get(name, 0) for name in ITEMS}
            moment = max(sums, key=lambda moment: sum(sums[moment].values()))
            memories.append(RankMemory(rank=rank, moment=moment, items=sums[moment]))
        return tuple(memories)

    def _kept(self, rank: int, saved: Sequence[int], deferred: Sequence[int]) -> int:
        """The largest number of bytes of activations that a rank keeps at one time.

        Args:
            saved: bytes that each of its stages keeps of one microbatch.
            deferred: bytes of these between the halves of a split backward.
        """
        ranks, microbatches = self.layout.pipeline, self.recipe.microbatches
        if ranks == 1:
            return saved[0]
        if len(set(saved)) == len(set(deferred)) == 1:
            pairs = totals(self.schedule, ranks=ranks, microbatches=microbatches, rank=rank)
            return max(passes * saved[0] + halves * deferred[0] for passes, halves in pairs)
        moments = peaks(self.schedule, ranks=ranks, microbatches=microbatches, rank=rank)
        most: int = max(sum(map(operator.mul, moment, (*saved, *deferred))) for moment in moments)
        return most

    def _moments(self, stages: Sequence[int]) -> dict[str, dict[str, int]]:
        """The items at each moment of a step that may be the largest, with the most activations of that moment."""
        own = [piece for number in stages for piece in self.stages[number]]
        blocks = [self.blocks[number] for stage in stages for number in self.parts[stage].blocks]
        others = [piece for stage in stages for piece in self.parts[stage].edges]
        whole = added(self.pieces[piece] for piece in own)
        edges = added(self.pieces[piece] for piece in others)
        block = max((self.pieces[piece] for piece in own if is_in_block(piece)), default=NOTHING)
        fsdp = self.sums == "fsdp2"
        accumulates = self.recipe.microbatches > 1 or self.layout.pipeline > 1
        stored = {"parameters": whole.parameters, "optimizer": whole.optimizer}
        gathered, buffers, unreduced, reducing = 0, 0, 0, 0
        if fsdp:
            reshards = self.config.frees_after_forward
            gathered = edges.gathered + _GATHERED_BLOCKS * block.gathered if reshards else whole.gathered
            gathered = min(gathered, whole.gathered)
            buffers = _GATHER_BUFFERS * block.gathered if reshards else 0
            unreduced = whole.unreduced if accumulates else edges.gradients
            # FSDP2 reduces the unit of the pieces outside blocks last.
            reducing = max(block.gradients + _REDUCED_BLOCKS * block.unreduced, block.unreduced + edges.unreduced)
        kept = 0
        if fsdp and self.config.symmetric_memory:
            buffers = _SYMMETRIC_GATHERS * block.gathered + edges.gathered
            # Symmetric memory is a separate pool, which other tensors cannot use.
            kept = buffers + max(block.unreduced, edges.unreduced)
        # Without FSDP2 gradients are summed in place.
        gradients = 0 if fsdp or not accumulates else whole.parameters
        loss = self._loss(own)
        # Messages of pipeline parallelism, and a gathered or unsummed residual stream of tensor parallelism.
        messages = 2 * self.hidden if self.layout.pipeline > 1 else 0
        if self.layout.tensor > 1 and self.config.sequence_parallel:
            messages += 2 * self.hidden * self.layout.tensor
        backward = max((block.again for block in blocks), default=0) + gradients_together(*self.shape)
        start = {**stored, "gathered parameters": gathered, "activations": _ALL_KEPT}
        before = unreduced if accumulates else 0
        moments = {
            "loss": {
                **start,
                "gradients": gradients,
                "unreduced gradients": before,
                "logits and loss": loss,
                "communication buffers": kept + messages,
            },
            "backward": {
                **start,
                "gradients": gradients,
                "unreduced gradients": unreduced + (0 if accumulates else reducing),
                "backward of a block": backward,
                "communication buffers": buffers + messages,
            },
            "end": {
                **start,
                "activations": max((block.saved for block in blocks), default=0),
                # Gradients of a unit are freed when they are reduced: each exists only once.
                "gradients": gradients if fsdp and accumulates else whole.parameters,
                "unreduced gradients": unreduced + reducing,
                "backward of a block": backward,
                "communication buffers": buffers + messages,
            },
            "optimizer": {**stored, "gradients": whole.parameters, "activations": 0, "communication buffers": kept},
        }
        if self.config.cpu_offload:
            for items in moments.values():
                items.update(dict.fromkeys(("parameters", "gradients", "optimizer"), 0))
        return moments

    def saved(self, number: int) -> int:
        """Bytes that a stage keeps of one microbatch."""
        parts = self.parts[number]
        saved = sum([self.blocks[block].saved for block in parts.blocks])
        saved += sum([self.edges.get(piece, 0) for piece in parts.edges])
        # The output of a stage is kept until its gradient comes.
        return saved + (self.hidden if number < len(self.stages) - 1 else 0)

    def _loss(self, pieces: Sequence[str]) -> int:
        """Largest sum of bytes of logits, log-probabilities and their gradients in one microbatch.

        In eager mode: in the forward pass the logits, their copy in float32 and log-probabilities; in the backward pass
        log-probabilities, their gradient, and the gradient of the copy. A compiled loss keeps the logits and writes
        their gradient. Logits that are split over the vocabulary (`titanlab.parallelism.loss.SplitLoss`):
        log-probabilities, their gradient, and its copy in the logits' precision.
        """
        recipe, share = self.recipe, self.share
        last = (self.account.pieces or ("",))[-1]
        edges = {edge.name: edge for edge in edge_operations(self.model, recipe.microbatch, recipe.training.seq_len)}
        edge = edges.get(last or next(reversed(edges), ""))
        if last not in pieces or edge is None:
            return 0
        (*positions, columns), width, compiled = edge.output, share.element_bytes, recipe.compile.fuses_loss
        tokens = math.prod(positions) // share.context
        if recipe.loss_chunk:
            return chunk_bytes(
                tokens=tokens,
                chunk=recipe.loss_chunk,
                columns=-(-columns // share.tensor),
                dim=self.account.dim,
                width=width,
                accelerator=share.accelerator,
                compiled=compiled,
            )
        splits = share.tensor if self.config.loss_parallel else 1
        logits = tokens * -(-columns // splits)
        copy = _FLOAT if width != _FLOAT else 0
        if splits > 1:
            forward = width + (0 if compiled else copy) + _FLOAT
            return logits * max(forward, 2 * _FLOAT + (width if copy else 0))
        return logits * (2 * width if compiled else max(width + copy + _FLOAT, 3 * _FLOAT))


class PieceBytes(NamedTuple):
    """Bytes of one rank for one or several pieces of the model.

    Attributes:
        parameters: stored; a shard is padded as FSDP2 pads it.
        optimizer: state of the optimizer.
        gathered: all parameters of the piece, in the precision in which they compute.
        gradients: of all parameters of the piece, in that precision.
        unreduced: the same gradients in the precision in which they are summed.
    """

    parameters: int
    optimizer: int
    gathered: int
    gradients: int
    unreduced: int


NOTHING = PieceBytes(0, 0, 0, 0, 0)


def added(parts: Iterable[PieceBytes]) -> PieceBytes:
    columns = list(zip(*parts, strict=True))
    return PieceBytes(*map(sum, columns)) if columns else NOTHING


@functools.lru_cache(maxsize=4096)
def stored_pieces(
    model: ModelConfig, precision: PrecisionConfig, optimizer: OptimizerConfig, tensor: int, fsdp: int, expert: int = 1
) -> Mapping[str, PieceBytes]:
    """Bytes by piece, for the rank with the largest part of each parameter; the last three arguments are degrees."""
    whole, formats, like, names = model_facts(model).account, precision.formats(), representatives(model), _names(model)
    wide = tuple(f"{piece}." for piece in matched(whole, formats.fp32_parts))
    float8 = precision.float8_gathered(whole)
    layout = Layout(shard=fsdp, tensor=tensor, expert=expert)
    account = account_for(whole, layout)
    kinds = {}
    for piece in set(like.values()):
        parts = []
        for name in names[piece]:
            degrees = cuts_of(account, name, layout)._asdict()
            part = stored_part(account, name, **degrees)
            elements = math.prod(gathered_part(account, name, **degrees))
            compute, reduce = (4, 4) if name.startswith(wide) else (formats.compute_bytes, formats.reduce_bytes)
            stored = Stored(name=name, shape=whole.parameters[name], part=part, element_bytes=formats.master_bytes)
            parts.append(
                PieceBytes(
                    parameters=stored.part_bytes,
                    optimizer=optimizer.state_bytes(stored),
                    gathered=elements * (1 if name in float8 else compute),
                    gradients=elements * compute,
                    unreduced=elements * reduce,
                )
            )
        kinds[piece] = added(parts)
    return {piece: kinds[other] for piece, other in like.items()}


@functools.lru_cache(maxsize=256)
def representatives(model: ModelConfig) -> Mapping[str, str]:
    """By piece, the first piece with parameters of the same names and shapes."""
    account = model_facts(model).account
    first: dict[tuple[tuple[str, tuple[int, ...]], ...], str] = {}
    representative_of = {}
    for piece, names in _names(model).items():
        kind = tuple((name.removeprefix(f"{piece}."), account.parameters[name]) for name in names)
        # Pieces outside blocks may differ in more than their parameters.
        representative_of[piece] = first.setdefault(kind, piece) if is_in_block(piece) else piece
    return representative_of


@functools.lru_cache(maxsize=256)
def _names(model: ModelConfig) -> Mapping[str, Sequence[str]]:
    """Names of parameters by piece; a model that cannot be cut is one piece without a name."""
    account = model_facts(model).account
    names: dict[str, list[str]] = {piece: [] for piece in account.pieces or ("",)}
    depth = {piece: piece.count(".") + 1 for piece in names}
    for name in account.parameters:
        steps = name.split(".")
        piece = next((".".join(steps[:n]) for n in sorted(set(depth.values())) if ".".join(steps[:n]) in names), "")
        names.setdefault(piece, []).append(name)
    return names


def reserved_bytes(recipe: Recipe, machine: Machine, memory: RankMemory) -> int:
    """Bytes that a rank of a resolved recipe takes from its device, with buffers of messages that its process keeps."""
    messages = exchanged_bytes(recipe, memory.rank) if machine.message_excess else 0.0
    return machine.reserved_bytes(memory.allocated) + round(machine.message_excess * messages)


def exchanged_bytes(recipe: Recipe, pipeline: int) -> float:
    """Bytes of the tensors that a rank sends or receives for one microbatch.

    The heap of a process keeps the tensors' buffers, because they are freed in another order than allocated.
    """
    if recipe.layout.world == 1:
        return 0.0
    rows = step_traffic(step_of(recipe), Coordinate(pipeline=pipeline))
    return sum(row.bytes for row in rows) / recipe.microbatches


# Gradients of a block's activations that exist together, in units of its largest tensor: for a product of two tensors,
# the gradients of the result and of both factors.
_LARGEST_TOGETHER = 3


class BlockBytes(NamedTuple):
    """Bytes of a block: kept between forward and backward, and recomputed before its backward begins."""

    saved: int
    again: int


@functools.lru_cache(maxsize=8192)
def block_bytes(
    ac: ACConfig, model: ModelConfig, share: Share, microbatch: int, seq_len: int
) -> tuple[tuple[BlockBytes, ...], tuple[int, ...]]:
    """The different blocks, and for each block its index in them."""
    block = block_operations(model, microbatch, seq_len)
    first, kind_of = treatments(ac, model_facts(model).account.layers)
    kinds = []
    for number in first:
        saved = ac.saved_bytes(block, share, number=number)
        # Without checkpointing autograd keeps all of these.
        again = max(0, share.bytes_of(kept_activations(block)) - saved) if ac.recomputed(block, number=number) else 0
        kinds.append(BlockBytes(saved, again))
    return tuple(kinds), kind_of


def saved_bytes(ac: ACConfig, model: ModelConfig, share: Share, microbatch: int, seq_len: int) -> int:
    """Bytes that all blocks keep between forward and backward."""
    kinds, kind_of = block_bytes(ac, model, share, microbatch, seq_len)
    return sum(block.saved * kind_of.count(kind) for kind, block in enumerate(kinds))


@functools.lru_cache(maxsize=4096)
def gradients_together(model: ModelConfig, share: Share, microbatch: int, seq_len: int) -> int:
    block = block_operations(model, microbatch, seq_len)
    tensors = [tensor for operation in block for tensor in operation.keeps]
    tensors += [result for operation in block for operator in operation.operators for result in operator.results]
    return _LARGEST_TOGETHER * max((share.bytes_of([tensor]) for tensor in tensors), default=0)


@functools.lru_cache(maxsize=4096)
def edge_bytes(model: ModelConfig, share: Share, microbatch: int, seq_len: int) -> dict[str, int]:
    """Bytes that pieces before and after the blocks keep, by name."""
    return {edge.name: share.bytes_of(kept_activations([edge])) for edge in edge_operations(model, microbatch, seq_len)}


@functools.lru_cache(maxsize=4096)
def deferred_bytes(model: ModelConfig, share: Share, microbatch: int, seq_len: int) -> dict[str, int]:
    """Bytes between the two halves of a split backward, by name of an edge; a block has an empty name.

    The gradients of weights need the inputs of linear layers, and the gradients of their outputs; the rest is freed
    (`titanlab.parallelism.pipeline_weights`). So the bytes do not depend on checkpointing.
    """

    def factors(operations: Iterable[Operation]) -> Iterator[Activation]:
        for operation in operations:
            if operation.kind == "matmul":
                yield from operation.keeps
                for result in (result for operator in operation.operators for result in operator.results):
                    yield replace(result, name=f"{result.name}.gradient")

    pieces = {"": block_operations(model, microbatch, seq_len)}
    pieces |= {edge.name: (edge,) for edge in edge_operations(model, microbatch, seq_len)}
    return {name: share.bytes_of(factors(operations)) for name, operations in pieces.items()}


# For each moment: by stage of the rank, the microbatches between forward and gradient of the input; then, again by
# stage, the microbatches between the two halves of a split backward.
Moments = tuple[tuple[int, ...], ...]
# Each moment is compared with this many of the largest ones. A larger number finds more covered moments, but costs more
# time than it saves.
_COMPARED = 4


@functools.lru_cache(maxsize=4096)
def peaks(schedule: PipelineSchedule, *, ranks: int, microbatches: int, rank: int) -> Moments:
    """The moments of a rank in which its memory may be largest; the order of numbers is that of the rank's stages.

    Moments that a larger one covers in every stage are left out.
    """
    few = shorter(ranks, microbatches)
    if few < microbatches:
        # If a few more microbatches change nothing, any number does not: do not list the actions of all.
        of_few = all_peaks(schedule, ranks, few, rank)
        if of_few == all_peaks(schedule, ranks, min(microbatches, few + ranks), rank):
            return of_few
    return all_peaks(schedule, ranks, microbatches, rank)


@functools.lru_cache(maxsize=4096)
def totals(schedule: PipelineSchedule, *, ranks: int, microbatches: int, rank: int) -> tuple[tuple[int, int], ...]:
    """The same for a rank with equal stages: each moment's two kinds of numbers, added up over the stages."""
    moments = peaks(schedule, ranks=ranks, microbatches=microbatches, rank=rank)
    half = len(moments[0]) // 2
    largest: list[tuple[int, int]] = []
    for pair in sorted({(sum(moment[:half]), sum(moment[half:])) for moment in moments}, reverse=True):
        if not largest or pair[1] > largest[-1][1]:
            largest.append(pair)
    return tuple(largest)


@functools.lru_cache(maxsize=4096)
def all_peaks(schedule: PipelineSchedule, ranks: int, microbatches: int, rank: int) -> Moments:
    """The moments of `peaks`, from all actions of a rank."""
    stages = [stage for stage, owner in enumerate(placement_of(schedule, ranks)) if owner == rank]
    place = {stage: number for number, stage in enumerate(stages)}
    alive, maxima, rose = [0] * 2 * len(stages), set(), False
    for stage, kind, _ in actions_of(schedule, ranks, microbatches)[rank]:
        number = place[stage]
        if kind is Kind.FORWARD:
            alive[number] += 1
            rose = True
            continue
        # A number can be largest only just before it falls.
        if rose:
            maxima.add(tuple(alive))
        alive[number + len(stages) if kind is Kind.WEIGHT else number] -= 1
        rose = kind is Kind.INPUT
        if rose:
            alive[number + len(stages)] += 1
    maxima.add(tuple(alive))
    largest: list[tuple[int, ...]] = []
    # A moment has a smaller sum than one that covers it.
    for moment in sorted(maxima, key=sum, reverse=True):
        if not any(all(map(operator.ge, other, moment)) for other in largest[:_COMPARED]):
            largest.append(moment)
    return tuple(sorted(largest))
