"""Seconds of a block, and of the pieces before and after the blocks, for one microbatch on one rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from titanlab.costs.account import Operation
from titanlab.costs.layout import Layout
from titanlab.costs.tensor_styles import STYLES
from titanlab.planner.machine import Axis, Machine
from titanlab.planner.model_facts import Key, ModelFacts, Unkeyed, model_facts
from titanlab.planner.timing.block_work import Kernel, Part, kernel_seconds, work_of
from titanlab.planner.timing.exchange import axis_in, context_rows, seconds_of, tensor_rows
from titanlab.recipe.communication import step_of
from titanlab.recipe.recipe import Recipe

# Bytes that the loss moves for each logit. Separate kernels in float32: cast 2 + 4, log-softmax 4 + 4, its backward 8 +
# 4, cast back 4 + 2. Compiled: two passes forward over 2 bytes, one backward that reads and writes 2.
_LOSS_BYTES, _COMPILED_LOSS_BYTES = 32, 8
_LOSS_KERNELS, _COMPILED_LOSS_KERNELS = 12, 4
# Operators with which torch's compiled and eager collectives appear in a policy's list.
_GATHER, _SCATTER = "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.reduce_scatter_tensor.default"


class PieceTime(NamedTuple):
    """Seconds of a block or piece for one microbatch.

    Attributes:
        forward, inputs, weights, recomputed: computation of the forward pass, of the gradients of inputs, of those of
            weights, and of the forward pass again.
        tensor_forward, tensor_backward: exposed communication of tensor parallelism.
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
class Shape:
    """Everything on which the time of a block depends, as the key of a cache."""

    model: Key
    precision: Key
    ac: Key
    machine: Machine
    microbatch: int
    seq_len: int
    tensor: int
    context: int
    # Only the position of ranks on nodes; the degrees of the outer axes are left out.
    inner: Layout
    fuses_blocks: bool
    fuses_loss: bool
    sequence_parallel: bool
    loss_parallel: bool
    async_tensor: bool
    context_method: str


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelTime:
    """Seconds of every piece for one microbatch.

    Attributes:
        kinds: the different blocks, as their recomputation differs.
        kind_of: index of each block in `kinds`.
        edges: by name, the pieces before and after the blocks; the last one includes the loss.
        once: communication of tensor parallelism in a step for each block.
    """

    kinds: tuple[PieceTime, ...]
    kind_of: tuple[int, ...]
    edges: dict[str, PieceTime]
    once: float


def shape_of(recipe: Recipe, machine: Machine, model: Key, precision: Key, ac: Key) -> Shape:
    """The shape of a resolved recipe's blocks."""
    layout, config = recipe.layout, recipe.parallelism
    return Shape(
        model=model,
        precision=precision,
        ac=ac,
        machine=machine,
        microbatch=recipe.microbatch,
        seq_len=recipe.training.seq_len,
        tensor=layout.tensor,
        context=layout.context,
        inner=Layout(pipeline=1, replicate=1, shard=1, context=layout.context, tensor=layout.tensor),
        fuses_blocks=recipe.compile.fuses_blocks,
        fuses_loss=recipe.compile.fuses_loss,
        sequence_parallel=config.sequence_parallel,
        loss_parallel=config.loss_parallel,
        async_tensor=config.async_tensor,
        context_method=config.context_method,
    )


class _Shaped:
    """Computes the times of one shape."""

    def __init__(self, shape: Shape, recipe: Recipe) -> None:
        self.shape, self.machine = shape, shape.machine
        self.facts: ModelFacts = model_facts(shape.model)
        formats = shape.precision.value.formats()
        products = shape.precision.value.products(self.facts.sample)
        # Without the degrees that the key leaves out.
        step = step_of(recipe, account=self.facts.sample)
        self.step = replace(step, layout=shape.inner, microbatches=1)
        self.part = Part(
            tensor=shape.tensor,
            context=shape.context,
            sequence_parallel=shape.sequence_parallel and shape.tensor > 1,
            dtype=formats.compute,
            width=formats.compute_bytes,
            fused=shape.fuses_blocks,
            plan=self.facts.sample.tensor_plan,
            prefix=f"{self.facts.block}.",
            products=products,
        )

    def block(self, operations: Sequence[Operation], number: int, recomputed: tuple[str, ...]) -> PieceTime:
        """One block."""
        shape, machine = self.shape, self.machine
        work = work_of(operations, self.part, frozenset(recomputed))
        forward, inputs, weights, again = (
            kernel_seconds(kernels, machine) for kernels in (work.forward, work.inputs, work.weights, work.recomputed)
        )
        rings = [kernel_seconds(kernels, machine) for kernels in (work.ring_forward, work.ring_backward)]
        context_forward, context_backward = self._context(rings[0], rings[1])
        if any(operation.kind == "attention" and operation.name in recomputed for operation in operations):
            context_backward += context_forward
        tensor_forward, tensor_backward = self._tensor(self.facts.block, number)
        if shape.async_tensor and tensor_forward:
            # Products and the collectives beside them run together.
            tensor_forward = self._exposed(forward - rings[0], tensor_forward)
            tensor_backward = self._exposed(inputs + again + weights - rings[1], tensor_backward)
        return PieceTime(
            forward, inputs, weights, again, tensor_forward, tensor_backward, context_forward, context_backward
        )

    def edge(self, operation: Operation, *, last: bool) -> PieceTime:
        """A piece before or after the blocks; the last one computes the loss too."""
        shape, machine = self.shape, self.machine
        part = replace(self.part, prefix="", fused=False)
        if operation.name in self.step.fp32_parts:
            part = replace(part, dtype="float32", width=4)
        work = work_of([operation], part, frozenset())
        forward, inputs, weights = (
            kernel_seconds(kernels, machine) for kernels in (work.forward, work.inputs, work.weights)
        )
        tensor_forward, tensor_backward = self._tensor(operation.name, None)
        if last:
            logits = math.prod(operation.output) / shape.context
            logits /= shape.tensor if shape.loss_parallel else 1
            fused = shape.fuses_loss
            moved = logits * (_COMPILED_LOSS_BYTES if fused else _LOSS_BYTES)
            launches = _COMPILED_LOSS_KERNELS if fused else _LOSS_KERNELS
            loss = kernel_seconds([Kernel(0.0, "", moved / 2, launches / 2, fused)], machine)
            forward, inputs = forward + loss, inputs + loss
        return PieceTime(forward, inputs, weights, 0.0, tensor_forward, tensor_backward)

    def once(self) -> float:
        """Communication of tensor parallelism that a block has once in a step."""
        if self.shape.tensor == 1:
            return 0.0
        return seconds_of(tensor_rows(self.step, self.facts.block)[1], self._axis("tensor"), self.machine)

    def _tensor(self, piece: str, number: int | None) -> tuple[float, float]:
        """Communication of tensor parallelism in the forward and the backward pass, with that of recomputation."""
        if self.shape.tensor == 1:
            return 0.0, 0.0
        rows = tensor_rows(self.step, piece)[0]
        axis = self._axis("tensor")
        half = seconds_of(rows, axis, self.machine) / 2
        if number is None:
            return half, half
        ac = self.shape.ac.value
        by_kind = {row.kind: seconds_of([row], axis, self.machine) for row in rows}
        styles = [style for path, style in self.facts.sample.tensor_plan.items() if path.startswith("layers.")]
        gathers = sum(STYLES[style].gathers for style in styles)
        sums = sum(STYLES[style].sums for style in styles)
        repeated = 0.0
        if gathers + sums and self.shape.sequence_parallel:
            # The sum of the last product is not computed again, as the product is not.
            gather = by_kind.get("all_gather", 0.0) / (gathers + sums)
            scatter = by_kind.get(self.step.scatter, 0.0) / (gathers + sums)
            repeated += gathers * gather if ac.repeats_collective(_GATHER, number=number) else 0.0
            repeated += (sums - 1) * scatter if ac.repeats_collective(_SCATTER, number=number) else 0.0
        return half, half + repeated

    def _context(self, attention: float, backward: float) -> tuple[float, float]:
        """Exposed communication of a ring, max(0, X − A/c) for each hop, or of a gather, which is all exposed."""
        ranks = self.shape.context
        if ranks == 1:
            return 0.0, 0.0
        axis = self._axis("context")
        sent = seconds_of(context_rows(self.step, self.facts.block), axis, self.machine)
        if self.shape.context_method != "ring":
            return sent / 3, sent * 2 / 3
        # Of three transfers, one is in the forward pass; the backward sends keys, values and their gradients.
        hidden = (ranks - 1) / ranks
        return max(0.0, sent / 3 - attention * hidden), max(0.0, sent * 2 / 3 - backward * hidden)

    def _exposed(self, compute: float, exchange: float) -> float:
        return exposed(compute, exchange, self.machine)

    def _axis(self, name: str) -> Axis:
        return axis_in(self.shape.inner, name, self.machine.per_node)


def exposed(compute: float, exchange: float, machine: Machine) -> float:
    """Time that an exchange adds to a computation beside it: κ·min(C, X) + |C − X| − C."""
    return machine.efficiencies.overlap * min(compute, exchange) + abs(compute - exchange) - compute


def model_time(shape: Shape, recipe: Recipe) -> ModelTime:
    """The times of all pieces of a recipe with this shape."""
    return _cached(shape, Unkeyed(recipe))


@functools.lru_cache(maxsize=4096)
def _cached(shape: Shape, unkeyed: Unkeyed[Recipe]) -> ModelTime:
    model, shaped = shape.model.value, _Shaped(shape, unkeyed.value)
    operations = model.block_operations(batch=shape.microbatch, seq_len=shape.seq_len)
    names: dict[object, int] = {}
    kind_of, kinds = [], []
    for number in range(shaped.facts.account.layers):
        treatment = shape.ac.value.treatment(number)
        if treatment not in names:
            names[treatment] = len(names)
            recomputed = shape.ac.value.recomputed(operations, number=number)
            kinds.append(shaped.block(operations, number, recomputed))
        kind_of.append(names[treatment])
    edges = model.edge_operations(batch=shape.microbatch, seq_len=shape.seq_len)
    last = shaped.facts.after[-1] if shaped.facts.after else edges[-1].name
    return ModelTime(
        kinds=tuple(kinds),
        kind_of=tuple(kind_of),
        edges={edge.name: shaped.edge(edge, last=edge.name == last) for edge in edges},
        once=shaped.once(),
    )
