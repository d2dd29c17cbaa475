"""The work of a block on one rank: FLOPs and bytes of its kernels in the forward and the backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titanlab.costs.account import STYLES, Operation, TensorPlan
from titanlab.plan.machine import Machine
from titanlab.techniques.precision.contract import ProductFormat

# Side of a tile of the output that a product's kernels compute at once; a part of a tile takes as long as all of it.
_TILE = 128
# The backward pass of fused attention has five products, the forward pass two (arXiv 2307.08691, section 2.3).
_ATTENTION_BACKWARD = 2.5
# Kernels read the gradient and what was kept, and write a gradient: twice the forward pass.
_POINTWISE_BACKWARD = 2.0


class KernelGroup(NamedTuple):
    """Some kernels that are bounded by the same thing.

    Attributes:
        flops: of products or attention.
        rate: dtype of products, or `attention`.
        moved: bytes that are read and written.
        launches: number of kernels.
        fused: whether a compiler has made them.
    """

    flops: float
    rate: str
    moved: float
    launches: float
    fused: bool


# Of the forward pass, of the gradients of inputs, and of the gradients of weights.
_Passes = tuple[list[KernelGroup], list[KernelGroup], list[KernelGroup]]


class OperationWork(NamedTuple):
    """Kernels of one operation for one microbatch.

    Attributes:
        name, kind: of the operation.
        forward: of the forward pass.
        inputs: of the backward pass, except those of `weights`.
        weights: products for the gradients of weights.
    """

    name: str
    kind: str
    forward: Sequence[KernelGroup]
    inputs: Sequence[KernelGroup]
    weights: Sequence[KernelGroup]


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """One rank's part of the operations, and how they run.

    Attributes:
        tensor, context: degrees.
        sequence_parallel: the residual stream is cut too.
        expert: degree; above 1 each rank of the tensor axis routes its own tokens.
        dtype: of products that no format changes, by torch's name.
        width: bytes of an element of it.
        fused: neighbouring operations that memory bandwidth bounds are one kernel.
        plan: style of each module, as in the model's account; a block has the names of the first one.
        prefix: of the names of the operations in that plan.
        products: by path, products in another format.
    """

    tensor: int
    context: int
    sequence_parallel: bool
    expert: int
    dtype: str
    width: int
    fused: bool
    plan: TensorPlan
    prefix: str
    products: Mapping[str, ProductFormat]


def kernel_seconds(kernels: Sequence[KernelGroup], machine: Machine) -> float:
    """Time of kernels, one after another: max(FLOPs / rate, bytes / bandwidth) + launch for each."""
    shares, total = machine.efficiencies, 0.0
    for flops, rate, moved, launches, fused in kernels:
        memory = moved / (machine.memory_bytes_per_second * (shares.fused_memory if fused else shares.eager_memory))
        if flops == 0:
            total += memory
        elif rate == "attention":
            total += max(flops / (machine.attention_flops * shares.attention), memory)
        else:
            total += max(flops / (machine.product_rate(rate) * shares.product), memory)
        total += launches * shares.launch_seconds
    return total


def work_of(operations: Sequence[Operation], part: RankWork) -> list[OperationWork]:
    """The kernels of operations that follow each other."""
    work = []
    follows, cast = False, set[str]()
    for operation in operations:
        if operation.kind == "matmul":
            # A compiler casts an input once for all products that read it.
            source = operation.keeps[0].name if operation.keeps and part.fused else operation.name
            kernels = _product(operation, part, casts_input=source not in cast)
            cast.add(source)
        elif operation.kind == "attention":
            kernels = _attention(operation, part)
        elif operation.kind == "exchange":
            work.append(OperationWork(operation.name, operation.kind, *_sorting(operation, part)))
            continue
        else:
            kernel = _memory_kernel(operation, part, follows=follows)
            kernels = [kernel], [kernel._replace(moved=_POINTWISE_BACKWARD * kernel.moved)], []
        follows = operation.kind in ("norm", "pointwise")
        work.append(OperationWork(operation.name, operation.kind, *kernels))
    return work


def _attention(operation: Operation, part: RankWork) -> _Passes:
    flops = operation.flops / 2 / (part.tensor * part.context)  # causal: half of the square
    moved = 4 * math.prod(operation.output) * part.width / (part.tensor * part.context)
    backward = KernelGroup(_ATTENTION_BACKWARD * flops, "attention", 2 * moved, 3, True)
    return [KernelGroup(flops, "attention", moved, 1, True)], [backward], []


def _sorting(operation: Operation, part: RankWork) -> _Passes:
    """Rows that travel are sorted beside it, in the backward pass too; without expert parallelism none travels."""
    if part.expert == 1:
        return [], [], []
    moved = operation.passes * math.prod(operation.output) * part.width / (part.context * part.tensor)
    kernels = [KernelGroup(0.0, "", moved, 1, part.fused)]
    return kernels, kernels, []


def _memory_kernel(operation: Operation, part: RankWork, *, follows: bool) -> KernelGroup:
    """An operation that memory bandwidth bounds; `follows`: it stands after another one.

    A fused operation writes its result, and the first of a group also reads its input.
    """
    results = [tensor for operator in operation.operators for tensor in operator.results]
    cut = results[0].cut if results else "stream"
    moves = part.expert > 1 and bool(results and results[0].with_experts)
    is_cut = moves or cut == "part" or (cut == "stream" and part.sequence_parallel)
    ranks = part.context * (part.tensor if is_cut else 1)
    passes = operation.passes
    if part.fused:
        passes = min(passes, 1.0 if follows else 2.0)
    launches = 0.5 if part.fused else max(1.0, operation.passes / 2.5)
    return KernelGroup(0.0, "", passes * math.prod(operation.output) * part.width / ranks, launches, part.fused)


def _product(operation: Operation, part: RankWork, *, casts_input: bool) -> _Passes:
    """Kernels of a linear layer: forward, gradient of the input, gradient of the weight."""
    path = f"{part.prefix}{operation.layer or operation.name}"
    rows = math.prod(operation.output[:-1]) / part.context
    columns = operation.output[-1]
    inner = operation.flops / (2 * math.prod(operation.output))
    style = STYLES.get(part.plan.style_of(path))
    dim = (
        style.cut_dim - style.is_stack if style is not None and style.cut_dim is not None and part.tensor > 1 else None
    )
    groups = operation.groups
    if part.expert > 1 and operation.keeps and operation.keeps[0].with_experts:
        # Every rank has some experts, and with a balanced load as many rows as it sends.
        rows, groups, dim = rows / part.tensor, max(1, groups // part.expert), None
    if dim == 0:
        columns = -(-columns // part.tensor)
    elif dim == 1:
        inner = inner / part.tensor
    moved = (rows * inner + groups * inner * columns + rows * columns) * part.width
    product = part.products.get(path)
    formats = (
        (product.forward, product.input_gradient, product.weight_gradient) if product is not None else (part.dtype,) * 3
    )
    flops = 2 * rows * inner * columns
    kernels = [
        [KernelGroup(flops * _waste(*shape), dtype, moved, 1, True)]
        for dtype, shape in zip(
            formats, ((rows / groups, columns), (rows / groups, inner), (inner, columns)), strict=True
        )
    ]
    if operation.layer:
        # The weights of several layers are concatenated: read 1 and write 1.
        kernels[0].append(KernelGroup(0.0, "", 2 * inner * columns * part.width, 1, False))
    if product is not None:
        # Half of the casts of input and weight run in the forward pass; those of the gradient run in the backward.
        values = (rows * inner * casts_input + inner * columns) * product.cast_bytes / 2
        launches = product.cast_kernels * (0.5 if part.fused else 1)
        kernels[0].append(KernelGroup(0.0, "", values, launches, part.fused))
        kernels[1].append(KernelGroup(0.0, "", values + rows * columns * product.cast_bytes, 2 * launches, part.fused))
    return kernels[0], kernels[1], kernels[2]


def _waste(rows: float, columns: float) -> float:
    """How much more a product computes because tiles at the edges of its output are not full."""
    return math.ceil(rows / _TILE) * math.ceil(columns / _TILE) * _TILE**2 / (rows * columns)
