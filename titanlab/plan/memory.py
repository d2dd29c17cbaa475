"""The memory that each rank of a pipeline needs, item by item, and what it takes from its device.

The bytes of parameters, gradients and optimizer state are exact, those of saved activations are what the policies of
checkpointing declare. The rest follows from how FSDP2, autograd, the loss and the allocator work, and is estimated.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titanlab.costs import (
    Coordinate,
    Layout,
    Share,
    account_for,
    cuts_of,
    gathered_part,
    hidden_shape,
    is_in_block,
    step_traffic,
    stored_part,
)
from titanlab.plan.activations import (
    block_bytes,
    deferred_bytes,
    edge_bytes,
    gradients_together,
    loss_bytes,
    peaks,
    totals,
)
from titanlab.plan.machine import Machine
from titanlab.plan.stages import model_facts, parts_of, placement_of, stages_of
from titanlab.recipe import Recipe, step_of
from titanlab.techniques.model.contract import ModelConfig
from titanlab.techniques.optimizer.contract import OptimizerConfig, Stored
from titanlab.techniques.precision.contract import PrecisionConfig, matched

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
# FSDP2 gathers into a buffer of its own, and copies the parameters out of it.
_GATHER_BUFFERS = 1
# Symmetric memory keeps its buffers: those of two gathers that run at once, and what a reduction reads.
_SYMMETRIC_GATHERS = 2
# A block's gradients in the precision of the reduction: those that are sent, and those of the block before.
_REDUCED_BLOCKS = 2
# Bytes of activations, where all that a rank keeps still exist: no rank keeps as many.
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
        """Bytes of all tensors."""
        return sum(self.items.values())


def memory(recipe: Recipe) -> tuple[RankMemory, ...]:
    """The memory of each rank of a resolved recipe's pipeline.

    Raises:
        ConfigError: the pipeline's split or schedule does not fit the model or the batch.
    """
    return _Ranks(recipe).memory()


def most_memory(recipe: Recipe) -> RankMemory:
    """The memory of the rank that needs most."""
    return max(memory(recipe), key=lambda rank: rank.allocated)


class _Ranks:
    """The ranks of one recipe."""

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
        """By rank of the pipeline."""
        placement = placement_of(self.schedule, self.layout.pipeline)
        memories = []
        # Stages with pieces that are alike need the same; a pipeline has few different ones.
        kinds = [(*map(self.blocks.__getitem__, parts.blocks), *parts.edges) for parts in self.parts]
        known: dict[object, dict[str, dict[str, int]]] = {}
        saved = [self._stage(number) for number in range(len(placement))]
        deferred = [self._deferred(number) for number in range(len(placement))]
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
        """Bytes of activations that a rank keeps when they are most.

        Args:
            saved: bytes that each of its stages keeps of one microbatch.
            deferred: of them, between the halves of a split backward.
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
        """The items at the moments of a step that may be largest; of activations, the most that are kept then."""
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
            # The last of all units is that of the pieces outside blocks.
            reducing = max(block.gradients + _REDUCED_BLOCKS * block.unreduced, block.unreduced + edges.unreduced)
        kept = 0
        if fsdp and self.config.symmetric_memory:
            buffers = _SYMMETRIC_GATHERS * block.gathered + edges.gathered
            # A pool of their own, which lends nothing to other tensors.
            kept = buffers + max(block.unreduced, edges.unreduced)
        # Without FSDP2 gradients are summed where they are.
        gradients = 0 if fsdp or not accumulates else whole.parameters
        loss = self._loss(own)
        backward = max((block.again for block in blocks), default=0) + gradients_together(*self.shape)
        start = {**stored, "gathered parameters": gathered, "activations": _ALL_KEPT}
        before = unreduced if accumulates else 0
        moments = {
            "loss": {
                **start,
                "gradients": gradients,
                "unreduced gradients": before,
                "logits and loss": loss,
                "communication buffers": kept + self._messages(),
            },
            "backward": {
                **start,
                "gradients": gradients,
                "unreduced gradients": unreduced + (0 if accumulates else reducing),
                "backward of a block": backward,
                "communication buffers": buffers + self._messages(),
            },
            "end": {
                **start,
                "activations": max((block.saved for block in blocks), default=0),
                # Gradients of a unit are freed when they are reduced: each exists only once.
                "gradients": gradients if fsdp and accumulates else whole.parameters,
                "unreduced gradients": unreduced + reducing,
                "backward of a block": backward,
                "communication buffers": buffers + self._messages(),
            },
            "optimizer": {**stored, "gradients": whole.parameters, "activations": 0, "communication buffers": kept},
        }
        if self.config.cpu_offload:
            for items in moments.values():
                items.update(dict.fromkeys(("parameters", "gradients", "optimizer"), 0))
        return moments

    def _stage(self, number: int) -> int:
        """Bytes that a stage keeps of one microbatch."""
        parts = self.parts[number]
        saved = sum([self.blocks[block].saved for block in parts.blocks])
        saved += sum([self.edges.get(piece, 0) for piece in parts.edges])
        # The output of a stage is kept until its gradient comes.
        return saved + (self.hidden if number < len(self.stages) - 1 else 0)

    def _deferred(self, number: int) -> int:
        """Bytes that a stage keeps of one microbatch between the halves of a split backward."""
        known, parts = deferred_bytes(*self.shape), self.parts[number]
        if self.recipe.loss_chunk:
            # The forward pass has computed the gradient of the head's weight.
            known = {**known, self.account.head: 0}
        return len(parts.blocks) * known[""] + sum([known.get(piece, 0) for piece in parts.edges])

    def _loss(self, pieces: Sequence[str]) -> int:
        last = (self.account.pieces or ("",))[-1]
        if last not in pieces:
            return 0
        edge = last or next(reversed(self.edges), "")
        return loss_bytes(
            *self.shape,
            last=edge,
            loss_parallel=self.config.loss_parallel,
            compiled=self.recipe.compile.fuses_loss,
            chunk=self.recipe.loss_chunk,
        )

    def _messages(self) -> int:
        """Buffers of pipeline and tensor parallelism: what arrives, and a gathered or a not yet summed stream."""
        layout = self.layout
        size = 2 * self.hidden if layout.pipeline > 1 else 0
        if layout.tensor > 1 and self.config.sequence_parallel:
            size += 2 * self.hidden * layout.tensor
        return size


class PieceBytes(NamedTuple):
    """Bytes of one rank for a piece of the model, or for several.

    Attributes:
        parameters: stored; a shard is padded as FSDP2 pads it.
        optimizer: state of the optimizer.
        gathered: all parameters of the piece, in the precision in which they compute.
        gradients: of all parameters of the piece, in that precision.
        unreduced: the same in the precision in which they are summed.
    """

    parameters: int
    optimizer: int
    gathered: int
    gradients: int
    unreduced: int


NOTHING = PieceBytes(0, 0, 0, 0, 0)


def added(parts: Iterable[PieceBytes]) -> PieceBytes:
    """The sum of several pieces."""
    return PieceBytes(*(sum(column) for column in zip(*parts, strict=True))) if (parts := list(parts)) else NOTHING


@functools.lru_cache(maxsize=4096)
def stored_pieces(
    model: ModelConfig, precision: PrecisionConfig, optimizer: OptimizerConfig, tensor: int, fsdp: int, expert: int = 1
) -> Mapping[str, PieceBytes]:
    """Bytes by piece, for the rank with the largest part of each parameter; the last three are degrees."""
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
    """Bytes that a rank of a resolved recipe takes from its device, with what its messages leave in its process."""
    messages = exchanged_bytes(recipe, memory.rank) if machine.message_excess else 0.0
    return machine.reserved_bytes(memory.allocated) + round(machine.message_excess * messages)


def exchanged_bytes(recipe: Recipe, pipeline: int) -> float:
    """Bytes of the tensors that a rank sends or receives for one microbatch.

    The heap of a process keeps their buffers: they are freed in another order than they were made.
    """
    if recipe.layout.world == 1:
        return 0.0
    rows = step_traffic(step_of(recipe), Coordinate(pipeline=pipeline))
    return sum(row.bytes for row in rows) / recipe.microbatches
