"""Seconds of a block, and of the pieces before and after the blocks, for one microbatch on one rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from titanlab.costs.account import EXCHANGE, STYLES, Operation, is_in_block
from titanlab.costs.layout import Layout
from titanlab.costs.traffic_account import TrafficRow
from titanlab.plan.block_work import KernelGroup, RankWork, kernel_seconds, work_of
from titanlab.plan.exchange import axis_in, context_rows, exchange_rows, expert_axis, seconds_of, tensor_rows
from titanlab.plan.machine import AxisPlacement, Machine
from titanlab.plan.stages import (
    ModelFacts,
    block_operations,
    edge_operations,
    model_facts,
    treatments,
)
from titanlab.recipe.communication import repeats_in_block, step_of
from titanlab.recipe.recipe import Recipe
from titanlab.techniques.ac.contract import ACConfig
from titanlab.techniques.model.contract import ModelConfig
from titanlab.techniques.precision.contract import PrecisionConfig

# Bytes that the loss moves for each logit. Separate kernels in float32: cast 2 + 4, log-softmax 4 + 4, its backward 8 +
# 4, cast back 4 + 2. Compiled: two passes forward over 2 bytes, one backward that reads and writes 2.
_LOSS_BYTES, _COMPILED_LOSS_BYTES = 32, 8
_LOSS_KERNELS, _COMPILED_LOSS_KERNELS = 12, 4


class PieceTime(NamedTuple):
    """Seconds of a block or piece for one microbatch.

    Attributes:
        forward, inputs, weights, recomputed: computation of the forward pass, of the gradients of inputs, of those of
            weights, and of the forward pass again.
        tensor_forward, tensor_backward: exposed communication of tensor and expert parallelism.
        context_forward, context_backward: exposed communication of context parallelism.
    """

    forward: float
    inputs: float
    weights: float
    recomputed: float
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0
    context_forward: float = 0.0
    context_backward: float = 0.0

    @property
    def ahead(self) -> float:
        """All of the forward pass."""
        return self.forward + self.tensor_forward + self.context_forward

    @property
    def back(self) -> float:
        """All of the backward pass."""
        return self.inputs + self.weights + self.recomputed + self.tensor_backward + self.context_backward

    @property
    def compute(self) -> float:
        """Forward and backward without communication."""
        return self.forward + self.inputs + self.weights + self.recomputed


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Everything but checkpointing on which the time of a block depends, as the key of a cache."""

    model: ModelConfig
    precision: PrecisionConfig
    machine: Machine
    microbatch: int
    seq_len: int
    tensor: int
    context: int
    expert: int
    # Only the position of ranks on nodes; the degrees of the outer axes are left out.
    inner: Layout
    compiled: bool
    fuses_blocks: bool
    fuses_loss: bool
    sequence_parallel: bool
    loss_parallel: bool
    chunks_loss: bool
    async_tensor: bool
    context_method: str
    # One of the recipes of this shape.
    recipe: Recipe = field(compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelTime:
    """Seconds of every piece for one microbatch.

    Attributes:
        kinds: the different blocks, as their recomputation differs.
        kind_of: index of each block in `kinds`.
        edges: by name, the pieces before and after the blocks; the last one includes the loss.
        once: communication of tensor parallelism in a step for each block.
        whole: sums over all pieces.
    """

    kinds: tuple[PieceTime, ...]
    kind_of: tuple[int, ...]
    edges: Mapping[str, PieceTime]
    once: float
    whole: PieceTime


def total(times: ModelTime, kind_of: Sequence[int], edges: Iterable[str]) -> PieceTime:
    """Sums over some blocks, by their kinds, and other pieces."""
    parts = [PieceTime(*(kind_of.count(kind) * part for part in piece)) for kind, piece in enumerate(times.kinds)]
    return _sum([*parts, *(times.edges[name] for name in edges if name in times.edges)])


def _sum(pieces: Iterable[PieceTime]) -> PieceTime:
    return PieceTime(*map(sum, zip(*pieces, strict=True)))


def shape_of(recipe: Recipe, machine: Machine) -> BlockShape:
    """The shape of a resolved recipe's blocks."""
    layout, config = recipe.layout, recipe.parallelism
    return BlockShape(
        model=recipe.model,
        precision=recipe.precision,
        machine=machine,
        microbatch=recipe.microbatch,
        seq_len=recipe.training.seq_len,
        tensor=layout.tensor,
        context=layout.context,
        expert=layout.expert,
        inner=Layout(context=layout.context, tensor=layout.tensor, expert=layout.expert),
        compiled=recipe.compile.blocks,
        fuses_blocks=recipe.compile.fuses_blocks,
        fuses_loss=recipe.compile.fuses_loss,
        sequence_parallel=config.sequence_parallel,
        loss_parallel=config.loss_parallel,
        chunks_loss=recipe.loss_chunk > 0,
        async_tensor=config.async_tensor,
        context_method=config.context_method,
        recipe=recipe,
    )


class _OperationTime(NamedTuple):
    """Seconds of one operation for one microbatch: forward, gradients of inputs, gradients of weights."""

    name: str
    kind: str
    forward: float
    inputs: float
    weights: float


class _Shaped:
    """The times of one shape, without and with checkpointing."""

    def __init__(self, shape: BlockShape) -> None:
        self.shape, self.machine, self.recipe = shape, shape.machine, shape.recipe
        recipe = shape.recipe
        self.facts: ModelFacts = model_facts(shape.model)
        formats = shape.precision.formats()
        # Without the degrees that the key leaves out.
        step = step_of(recipe, account=self.facts.sample)
        self.step = replace(step, layout=shape.inner, microbatches=1)
        self.part = RankWork(
            tensor=shape.tensor,
            context=shape.context,
            sequence_parallel=shape.sequence_parallel and shape.tensor > 1,
            expert=shape.expert,
            dtype=formats.compute,
            width=formats.compute_bytes,
            fused=shape.fuses_blocks,
            plan=step.account.plan,
            prefix=f"{self.facts.block}.",
            products=shape.precision.products(self.facts.sample),
        )
        self.operations = block_operations(shape.model, shape.microbatch, shape.seq_len)
        self.times = self._times(self.operations, self.part)
        attention = [time for time in self.times if time.kind == "attention"]
        self.ring = sum(time.forward for time in attention), sum(time.inputs for time in attention)
        self.context = self._context(*self.ring)
        self.exchange = 0.0
        if shape.expert > 1:
            axis = expert_axis(shape.inner, "expert", self.machine.per_node)
            self.exchange = seconds_of(exchange_rows(self.step, self.facts.block), axis, self.machine)
        self.tensor_rows = tensor_rows(self.step, self.facts.block) if shape.tensor > 1 else ([], [])
        edges = edge_operations(shape.model, shape.microbatch, shape.seq_len)
        last = self.facts.after[-1] if self.facts.after else edges[-1].name
        self.edges = {edge.name: self.edge(edge, last=edge.name == last) for edge in edges}

    def _times(self, operations: Sequence[Operation], part: RankWork) -> list[_OperationTime]:
        return [
            _OperationTime(work.name, work.kind, *(kernel_seconds(kernels, self.machine) for kernels in work[2:]))
            for work in work_of(operations, part)
        ]

    def block(self, number: int, ac: ACConfig) -> PieceTime:
        """One block."""
        recomputed = frozenset(ac.recomputed(self.operations, number=number))
        forward, inputs, weights = (sum(column) for column in list(zip(*self.times, strict=True))[2:])
        again = [time for time in self.times if time.name in recomputed]
        repeated = sum(time.forward for time in again)
        context_forward, context_backward = self.context
        if any(time.kind == "attention" for time in again):
            context_backward += context_forward
        tensor_forward, tensor_backward = self._tensor_of_block(number, ac)
        if self.shape.async_tensor and tensor_forward:
            # Products and the collectives beside them run together.
            tensor_forward = self._exposed(forward - self.ring[0], tensor_forward)
            tensor_backward = self._exposed(inputs + repeated + weights - self.ring[1], tensor_backward)
        # The rows of experts are needed at once, so nothing hides their way.
        tensor_forward += self.exchange
        tensor_backward += self.exchange * (2 if ac.repeats_collective(EXCHANGE, number=number) else 1)
        return PieceTime(
            forward, inputs, weights, repeated, tensor_forward, tensor_backward, context_forward, context_backward
        )

    def edge(self, operation: Operation, *, last: bool) -> PieceTime:
        """A piece before or after the blocks; the last one computes the loss too."""
        shape, machine = self.shape, self.machine
        part = replace(self.part, prefix="", fused=False)
        if operation.name in self.step.fp32_parts:
            part = replace(part, dtype="float32", width=4)
        (time,) = self._times([operation], part)
        forward, inputs = time.forward, time.inputs
        tensor = self._tensor_of_edge(operation.name)
        if last:
            logits = math.prod(operation.output) / shape.context
            logits /= shape.tensor if shape.loss_parallel else 1
            fused = shape.fuses_loss
            moved = logits * (_COMPILED_LOSS_BYTES if fused else _LOSS_BYTES)
            launches = _COMPILED_LOSS_KERNELS if fused else _LOSS_KERNELS
            loss = kernel_seconds([KernelGroup(0.0, "", moved / 2, launches / 2, fused)], machine)
            forward, inputs = forward + loss, inputs + loss
            if shape.chunks_loss:
                # The forward pass computes the gradients too.
                return PieceTime(forward + inputs + time.weights, 0.0, 0.0, 0.0, tensor, tensor)
        return PieceTime(forward, inputs, time.weights, 0.0, tensor, tensor)

    def once(self) -> float:
        """Communication of tensor parallelism that a block has once in a step."""
        return self._tensor_seconds(self.tensor_rows[1])

    def _tensor_of_edge(self, piece: str) -> float:
        """Communication of tensor parallelism in each pass of a piece outside blocks."""
        if self.shape.tensor == 1:
            return 0.0
        return self._tensor_seconds(tensor_rows(self.step, piece)[0]) / 2

    def _tensor_of_block(self, number: int, ac: ACConfig) -> tuple[float, float]:
        """Communication of tensor parallelism in the forward and the backward pass, with that of recomputation."""
        if self.shape.tensor == 1:
            return 0.0, 0.0
        by_kind = {row.kind: self._tensor_seconds([row]) for row in self.tensor_rows[0]}
        half = sum(by_kind.values()) / 2
        styles = [style for path, style in self.step.account.tensor_plan.items() if is_in_block(path)]
        last = int(self.shape.expert == 1)  # a block ends with a sum
        gathers = sum(STYLES[style].gathers for style in styles)
        sums = sum(STYLES[style].sums for style in styles)
        if not gathers + sums:
            return half, half
        # The sum of the last product is not computed again, as the product is not.
        repeats_gathers, repeats_sums = repeats_in_block(self.recipe, ac, number)
        again = max(0, sums - last) * repeats_sums * by_kind.get("all_reduce", 0.0)
        if self.shape.sequence_parallel:
            again = gathers * repeats_gathers * by_kind.get("all_gather", 0.0)
            again += max(0, sums - last) * repeats_sums * by_kind.get(self.step.scatter, 0.0)
        return half, half + again / (gathers + sums)

    def _tensor_seconds(self, rows: Sequence[TrafficRow]) -> float:
        return seconds_of(rows, self._axis("tensor"), self.machine) if rows else 0.0

    def _context(self, attention: float, backward: float) -> tuple[float, float]:
        """Exposed communication of a ring, max(0, X − A/c) for each hop, or of a gather, which is all exposed."""
        ranks = self.shape.context
        if ranks == 1:
            return 0.0, 0.0
        axis = self._axis("context")
        sent = seconds_of(context_rows(self.step, self.facts.block), axis, self.machine)
        if self.shape.context_method != "ring":
            return sent / 3, sent * 2 / 3
        # One of three transfers is in the forward pass; the backward sends keys, values and their gradients.
        hidden = (ranks - 1) / ranks
        return max(0.0, sent / 3 - attention * hidden), max(0.0, sent * 2 / 3 - backward * hidden)

    def _exposed(self, compute: float, exchange: float) -> float:
        return exposed(compute, exchange, self.machine)

    def _axis(self, name: str) -> AxisPlacement:
        return axis_in(self.shape.inner, name, self.machine.per_node)


def exposed(compute: float, exchange: float, machine: Machine) -> float:
    """Time that an exchange adds to a computation beside it: κ·min(C, X) + |C − X| − C."""
    return machine.efficiencies.overlap * min(compute, exchange) + abs(compute - exchange) - compute


def model_time(shape: BlockShape, ac: ACConfig) -> ModelTime:
    """The times of all pieces of a recipe with this shape and policy of checkpointing."""
    return _cached(_shaped(shape), ac)


@functools.lru_cache(maxsize=4096)
def _shaped(shape: BlockShape) -> _Shaped:
    return _Shaped(shape)


@functools.lru_cache(maxsize=16384)
def _cached(shaped: _Shaped, ac: ACConfig) -> ModelTime:
    first, kind_of = treatments(ac, shaped.facts.account.layers)
    kinds = tuple(shaped.block(number, ac) for number in first)
    times = ModelTime(kinds=kinds, kind_of=kind_of, edges=shaped.edges, once=shaped.once(), whole=kinds[0])
    return replace(times, whole=total(times, kind_of, shaped.edges))
