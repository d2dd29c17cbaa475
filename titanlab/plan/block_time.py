"""The time that one rank needs for a transformer block, and for each piece of the model before and after the blocks.

The time is that of kernels and of communication; `titanlab.costs.traffic_account` gives the bytes of communication.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from titanlab.costs import (
    EXCHANGE,
    STYLES,
    Coordinate,
    Layout,
    Operation,
    RoutedExperts,
    Share,
    TensorPlan,
    Traffic,
    TrafficRow,
    add_context,
    add_exchange,
    add_tensor,
    block_name,
    is_in_block,
    sum_whole_gradients,
    with_frozen,
)
from titanlab.plan.machine import BACKWARD, FORWARD, AxisPlacement, Machine, axis_of
from titanlab.plan.stages import Seen, block_operations, edge_operations, model_facts, share_of, treatments
from titanlab.recipe import Recipe, repeats_in_block, step_of
from titanlab.techniques.ac.contract import ACConfig
from titanlab.techniques.model.contract import ModelConfig
from titanlab.techniques.precision.contract import ProductFormat

# A product's kernels compute the output in square tiles of this side; a partial tile takes as long as a full one.
_TILE = 128
# Time to transpose one float8 element in memory, given as the bytes that separate kernels move in that time. A Hopper
# GPU took 1.98 ms for 2²⁸ elements (pytorch/pytorch#113560); kernels move 3.35 TB/s times the fitted share.
TRANSPOSED = 18
# Bytes moved to scale one element of a product's result: read 2 and write 2; eager mode also writes and reads the
# product of the two scales, in float32.
_SCALED, _EAGER_SCALED = 4, 12
# Bytes moved to add one element of a weight's gradient to the gradients of other chunks of tokens.
_ADDED = 6
# The backward pass of fused attention has five products, the forward pass two (arXiv 2307.08691, section 2.3).
_ATTENTION_BACKWARD = 2.5
# Bytes that `titanlab.parallelism.context` moves outside attention's kernels, for each element of the rank's part of
# the output, keys or values. `_RING_ENDS`: copies to float32 before the ring and back after it. `_MERGE`, for each hop:
# the float32 copy of the partial output (read 2, write 4) and its merge (read 8, write 4), in `_MERGE_KERNELS` kernels.
_RING_ENDS, _MERGE, _MERGE_KERNELS = 12, 18, 8
# The same for the backward pass. `_MERGE_QUERIES`, for each hop: the addition to the queries' float32 gradient.
# `_MERGE_KEYS`: zeros, the addition of the kernel's gradients to these zeros, and of other ranks' gradients in float32.
_MERGE_QUERIES, _MERGE_KEYS, _MERGE_BACKWARD_KERNELS = 10, 18, 10
# Rows of queries that one multiprocessor computes at once (a tile); and the number of multiprocessors of an H100, which
# stands for all devices (an A100 has 108, a B200 148). If there are fewer tiles, some multiprocessors are idle.
_QUERY_TILE, _MULTIPROCESSORS = 128, 132
# Memory traffic of a pointwise backward relative to its forward: it reads gradient and saved inputs, writes a gradient.
_POINTWISE_BACKWARD = 2.0


class KernelGroup(NamedTuple):
    """Kernels with one rate of products and one kind of memory access.

    Attributes:
        rate: key of the machine's rates: a dtype for products, kernel and direction for attention.
        moved: bytes that the kernels read and write.
        fused: whether a compiler generated the kernels.
    """

    flops: float
    rate: str
    moved: float
    launches: float
    fused: bool


# The kernels of an operation's forward pass, of the gradients of its inputs, and of the gradients of its weights.
_Passes = tuple[list[KernelGroup], list[KernelGroup], list[KernelGroup]]
Work = TypeVar("Work")


class OperationWork(NamedTuple, Generic[Work]):
    """The kernels (or the seconds) of an operation for one microbatch: forward, gradients of inputs and of weights."""

    name: str
    kind: str
    forward: Work
    inputs: Work
    weights: Work


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """One rank's share of the operations, and how the operations run.

    Attributes:
        share: if its `expert` is above 1, each rank of the tensor axis routes its own tokens.
        dtype: torch's name of the compute precision, in which products run unless `products` says otherwise.
        attention: name of the attention kernel.
        fused: whether neighbouring operations that memory bandwidth limits are one kernel.
        plan: style of each module, as in the model's account; all blocks use the names of the first block.
        prefix: text before an operation's name that makes it a path in `plan`.
        products: path of a linear layer → format of its products, if it is not `dtype`.
        cast_weights: names of weights that arrive in float8, from FSDP2's gather.
        casts_part: whether activations are cast before tensor parallelism gathers them.
        imbalance: rows of the busiest rank of expert parallelism, as a multiple of the ranks' mean.
        chunks: number of products that together compute one weight's gradient: one for each chunk of the loss.
    """

    share: Share
    dtype: str
    attention: str
    fused: bool
    plan: TensorPlan
    prefix: str
    products: Mapping[str, ProductFormat]
    cast_weights: frozenset[str] = frozenset()
    casts_part: bool = False
    imbalance: float = 1.0
    chunks: int = 1


# By how much the busiest expert's load exceeds the mean, as a share of the mean: 0.04 with the balance `bias`, 0.72
# with an auxiliary loss (arXiv 2408.15664, table 2, 1B: MaxVio over a whole validation set). Assumed: the share is the
# same for the fewer tokens of a step, whose loads vary more; and a model without a balance has 0.72 too.
_VIOLATIONS = {"bias": 0.04}
_VIOLATION = 0.72


def imbalance_of(experts: RoutedExperts | None, degree: int) -> float:
    """Token rows that the busiest rank of expert parallelism gets, as a multiple of the ranks' mean.

    Assumes that experts' loads are independent: a rank's mean load then deviates less than one expert's load.
    """
    if experts is None or degree == 1:
        return 1.0
    return 1 + _VIOLATIONS.get(experts.balance, _VIOLATION) / math.sqrt(experts.count / degree)


def kernel_seconds(kernels: Sequence[KernelGroup], machine: Machine) -> float:
    """Seconds of kernels that run one after another: the sum of max(FLOPs / rate, bytes / bandwidth) + launches."""
    shares, total = machine.efficiencies, 0.0
    for flops, rate, moved, launches, fused in kernels:
        memory = moved / (machine.memory_bytes_per_second * (shares.fused_memory if fused else shares.eager_memory))
        if flops == 0:
            total += memory
        else:
            total += max(flops / machine.flops_per_second(rate), memory)
        total += launches * shares.launch_seconds
    return total


# Host time to start a kernel of compiled code, as a share of an eager kernel's: compiled code dispatches no operator
# and makes no autograd node. Assumed from about 4 µs for a launch by inductor's wrapper, not measured.
_COMPILED_HOST = 0.2


def host_seconds(kernels: Sequence[KernelGroup], machine: Machine, *, compiled: bool) -> float:
    """Seconds that the host needs to start kernels."""
    share = _COMPILED_HOST if compiled else 1.0
    return share * machine.efficiencies.host_seconds * sum(group.launches for group in kernels)


def work_of(operations: Sequence[Operation], part: RankWork) -> list[OperationWork[list[KernelGroup]]]:
    """The kernels of each operation, for operations that run one after another."""
    share, width = part.share, part.share.element_bytes
    work, follows, cast = [], False, set[str]()
    for operation in operations:
        elements = math.prod(operation.output)
        kernels: _Passes
        if operation.kind == "matmul":
            # A compiler casts an input once for all products that read it.
            source = operation.keeps[0].name if operation.keeps and part.fused else operation.name
            kernels = _product(operation, part, casts_input=source not in cast)
            cast.add(source)
        elif operation.kind == "attention":
            flops = operation.flops / 2 / (share.tensor * share.context)  # causal: half of the square
            if share.context > 1:
                # A kernel computes a rectangle of queries × keys: its last tile is not full, and multiprocessors idle.
                batch, heads, seq_len, _ = operation.output
                chunk = seq_len / (2 * share.context)
                tiles = math.ceil(chunk / _QUERY_TILE)
                busy = min(1.0, batch * heads / share.tensor * tiles / _MULTIPROCESSORS)
                flops *= tiles * _QUERY_TILE / chunk / busy
            moved = 4 * elements * width / (share.tensor * share.context)
            ahead, back = (f"{part.attention} {direction}" for direction in (FORWARD, BACKWARD))
            backward = KernelGroup(_ATTENTION_BACKWARD * flops, back, 2 * moved, 3, True)
            kernels = [KernelGroup(flops, ahead, moved, 1, True)], [backward], []
        elif operation.kind == "exchange":
            kernels = [], [], []
            if share.expert > 1:
                # Each rank also sorts the rows that it exchanges, in the backward pass too.
                moved = operation.passes * elements * width / (share.context * share.tensor)
                sorting = [KernelGroup(0.0, "", moved, 1, part.fused)]
                kernels = sorting, sorting, []
        else:
            results = [tensor for operator in operation.operators for tensor in operator.results]
            cut = results[0].cut if results else "stream"
            moves = share.expert > 1 and bool(results and results[0].with_experts)
            is_cut = moves or cut == "part" or (cut == "stream" and share.sequence_parallel)
            ranks = share.context * (share.tensor if is_cut else 1)
            # A fused operation writes its result; the first operation of a fused group also reads its input.
            passes = min(operation.passes, 1.0 if follows else 2.0) if part.fused else operation.passes
            launches = 0.5 if part.fused else max(1.0, operation.passes / 2.5)
            kernel = KernelGroup(0.0, "", passes * elements * width / ranks, launches, part.fused)
            kernels = [kernel], [kernel._replace(moved=_POINTWISE_BACKWARD * kernel.moved)], []
        if operation.kind != "exchange":
            follows = operation.kind in ("norm", "pointwise")
        work.append(OperationWork(operation.name, operation.kind, *kernels))
    return work


def _product(operation: Operation, part: RankWork, *, casts_input: bool) -> _Passes:
    """Kernels of a linear layer: forward, gradient of the input, gradient of the weight."""
    share, width = part.share, part.share.element_bytes
    path = f"{part.prefix}{operation.layer or operation.name}"
    rows = math.prod(operation.output[:-1]) / share.context
    columns = operation.output[-1]
    inner = operation.flops / (2 * math.prod(operation.output))
    style = STYLES.get(part.plan.style_of(path))
    dim = (
        style.cut_dim - style.is_stack if style is not None and style.cut_dim is not None and share.tensor > 1 else None
    )
    groups = operation.groups
    if share.expert > 1 and operation.keeps and operation.keeps[0].with_experts:
        # Each rank has some of the experts; all ranks wait for the rank that gets the most rows.
        rows, groups, dim = rows / share.tensor * part.imbalance, max(1, groups // share.expert), None
    if dim == 0:
        columns = -(-columns // share.tensor)
    elif dim == 1:
        inner = inner / share.tensor
    moved = (rows * inner + groups * inner * columns + rows * columns) * width
    product = part.products.get(path)
    formats = (
        (product.forward, product.input_gradient, product.weight_gradient) if product is not None else (part.dtype,) * 3
    )
    shapes = ((rows / groups, columns), (rows / groups, inner), (inner, columns))
    kernels: list[list[KernelGroup]] = []
    for dtype, (height, length) in zip(formats, shapes, strict=True):
        # Tiles at the edges of the output are not full, but take as long as full tiles.
        waste = math.ceil(height / _TILE) * math.ceil(length / _TILE) * _TILE**2 / (height * length)
        kernels.append([KernelGroup(2 * rows * inner * columns * waste, dtype, moved, 1, True)])
    if operation.layer:
        # The weights of the joined layers are concatenated: each element is read once and written once.
        kernels[0].append(KernelGroup(0.0, "", 2 * inner * columns * width, 1, False))
    if product is not None:
        # Half of the casts of input and weight run in the forward pass; all other casts run in the backward pass.
        cast, launches = product.eager_cast_bytes, float(product.eager_cast_kernels)
        if part.fused:
            cast, launches = product.cast_bytes, product.cast_kernels / 2
        # Each rank casts only its part of what tensor parallelism gathers.
        inputs, gradients = (share.tensor if part.casts_part and dim == cut else 1 for cut in (0, 1))
        weights = 0 if f"{path}.weight" in part.cast_weights else inner * columns
        values = (rows * inner * casts_input / inputs + weights) * cast / 2
        kernels[0].append(KernelGroup(0.0, "", values, launches, part.fused))
        backward = values + rows * columns / gradients * cast
        kernels[1].append(KernelGroup(0.0, "", backward, 2 * launches, part.fused))
        scaled = product.scales_gradients * (_SCALED if part.fused else _EAGER_SCALED)
        of_inputs, of_weight = rows * inner * scaled, part.chunks * inner * columns * scaled
        # Float8 products need transposed copies: of the weight, and of both operands of the weight's gradient.
        if not part.fused and product.input_gradient.startswith("float8"):
            of_inputs += inner * columns * TRANSPOSED
        if not part.fused and product.weight_gradient.startswith("float8"):
            of_weight += (rows * columns + rows * inner) * TRANSPOSED
        if part.chunks > 1:
            of_weight += part.chunks * inner * columns * _ADDED
        if of_inputs:
            kernels[1].append(KernelGroup(0.0, "", of_inputs, 1, part.fused))
        if of_weight:
            kernels[2].append(KernelGroup(0.0, "", of_weight, 2 * part.chunks, part.fused))
    return kernels[0], kernels[1], kernels[2]


def seconds_of(rows: Iterable[TrafficRow], axis: AxisPlacement, machine: Machine) -> float:
    total = 0.0
    for row in rows:
        if row.kind == "recv":
            continue  # the time of a message is counted where it is sent
        hops = {"send": 1, "all_reduce": 2 * (axis.ranks - 1)}.get(row.kind)
        total += machine.collective_seconds(axis, row.wire_bytes, count=row.count, hops=hops)
    return total


def rows_of(formula: Callable[..., None], *inputs: Any, **options: Any) -> list[TrafficRow]:
    """The traffic rows that one formula for communication adds."""
    traffic = Traffic()
    formula(*inputs, traffic, **options)
    return traffic.rows()


# Bytes that the loss reads and writes for each logit. Separate float32 kernels: cast 2 + 4, log-softmax 4 + 4, its
# backward 8 + 4, cast back 4 + 2. Compiled: two forward passes that read 2, a backward pass that reads 2 and writes 2.
_LOSS_BYTES, _COMPILED_LOSS_BYTES = 32, 8
_LOSS_KERNELS, _COMPILED_LOSS_KERNELS = 12, 4


class PieceTime(NamedTuple):
    """Seconds of a block, or of another piece of the model, for one microbatch.

    Attributes:
        forward, inputs, weights, recomputed: computation of the forward pass, of gradients of inputs, of gradients of
            weights, and of recomputation.
        tensor_forward, tensor_backward: exposed communication of tensor and expert parallelism.
        context_forward, context_backward: exposed communication of context parallelism.
        host_forward, host_backward: host time without the hooks of FSDP2; a pass takes at least its host time.
    """

    forward: float
    inputs: float
    weights: float
    recomputed: float
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0
    context_forward: float = 0.0
    context_backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0

    @property
    def ahead(self) -> float:
        """Seconds of the forward pass, with communication."""
        return self.forward + self.tensor_forward + self.context_forward

    @property
    def back(self) -> float:
        """Seconds of the backward pass, with recomputation and communication."""
        return self.inputs + self.weights + self.recomputed + self.tensor_backward + self.context_backward

    @property
    def compute(self) -> float:
        """Seconds of both passes without communication."""
        return self.forward + self.inputs + self.weights + self.recomputed


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelTime:
    """Seconds of every piece for one microbatch.

    Attributes:
        model, seq_len: values of the recipes that these times are for.
        kinds, kind_of: time of each kind of block (kinds differ in recomputation), and each block's index in `kinds`.
        edges: time by name of the pieces before and after the blocks; the last piece includes the loss.
        once: seconds of the tensor-parallel communication that a block has once a step, not once a microbatch.
        whole: sums over all pieces.
    """

    model: ModelConfig
    seq_len: int
    kinds: tuple[PieceTime, ...]
    kind_of: tuple[int, ...]
    edges: Mapping[str, PieceTime]
    once: float
    whole: PieceTime


def added_times(parts: Iterable[PieceTime]) -> PieceTime:
    return PieceTime(*map(sum, zip(*parts, strict=True)))


def total(times: ModelTime, kind_of: Sequence[int], edges: Iterable[str]) -> PieceTime:
    """The sums of the times of some blocks, given by their kinds, and of other pieces, given by name."""
    parts = [PieceTime(*(kind_of.count(kind) * part for part in piece)) for kind, piece in enumerate(times.kinds)]
    parts += [times.edges[name] for name in edges if name in times.edges]
    return added_times(parts)


class AsyncProducts(NamedTuple):
    """Seconds of a block's products that AsyncTP fuses with a collective.

    Attributes:
        gathers: forward products that read what a collective gathers.
        sums: forward products whose results a collective sums.
        gradient_gathers: backward products that read a gathered gradient. Sums in the backward pass are not fused.
    """

    gathers: Sequence[float]
    sums: Sequence[float]
    gradient_gathers: Sequence[float]


class _Shaped:
    """The times of all recipes with the same shapes; `block` adds what a checkpointing policy recomputes."""

    def __init__(self, recipe: Recipe, machine: Machine) -> None:
        self.recipe, self.machine, self.layout = recipe, machine, _inside(recipe.layout)
        layout, model, formats = self.layout, recipe.model, recipe.precision.formats()
        self.facts = model_facts(model)
        # One microbatch, and only the degrees that cut a block: recipes that differ in other degrees share these times.
        self.step = replace(step_of(recipe, account=self.facts.sample), layout=layout, microbatches=1)
        self.part = RankWork(
            share=share_of(recipe),
            dtype=formats.compute,
            attention=machine.attention_kernel(
                model.attention,
                dtype=formats.compute,
                head_dim=self.facts.account.head_dim,
                seq_len=recipe.training.seq_len,
            ),
            fused=recipe.compile.fuses_blocks,
            plan=self.step.account.plan,
            prefix=f"{self.facts.block}.",
            products=recipe.precision.on_device(
                accelerator=recipe.cluster.accelerator, device=str(recipe.cluster.device)
            ).products(self.facts.sample),
            cast_weights=frozenset(self.step.float8_gathered),
            casts_part=recipe.precision.gathers_activations,
            imbalance=imbalance_of(self.facts.account.experts, layout.expert),
        )
        self.operations = block_operations(model, recipe.microbatch, recipe.training.seq_len)
        self.times = self._times(self.operations, self.part)
        compiled = recipe.compile.blocks
        self.host = {
            name: tuple(host_seconds(kernels, machine, compiled=compiled) for kernels in passes)
            for name, _, *passes in work_of(self.operations, self.part)
        }
        attention = [time for time in self.times if time.kind == "attention"]
        self.ring = sum(time.forward for time in attention), sum(time.inputs for time in attention)
        self.context, block = self._context(), (self.facts.block,)
        self.exchange = self._seconds(add_exchange, "expert", self.step, block, only_forward=True)
        self.exchange *= self.part.imbalance
        # Seconds of tensor parallelism by kind of collective; below, self.once has those that a block has once a step.
        self.tensor: dict[str, float] = {}
        self.collectives = 0
        if layout.tensor > 1:
            rows, axis = rows_of(add_tensor, self.step, block), axis_of(layout, "tensor", machine.per_node)
            if recipe.precision.gathers_activations:
                gathered = {"all_gather": self.step.element_bytes(self.facts.block)}
                rows = [replace(row, wire_bytes=row.wire_bytes // gathered.get(row.kind, 1)) for row in rows]
            self.tensor = {row.kind: seconds_of([row], axis, machine) for row in rows}
            self.collectives = sum(row.count for row in rows)
        self.once = self._seconds(sum_whole_gradients, "tensor", self.step, Coordinate(), block)
        edges = edge_operations(model, recipe.microbatch, recipe.training.seq_len)
        last = self.facts.after[-1] if self.facts.after else edges[-1].name
        self.edges = {edge.name: self._edge(edge, last=edge.name == last) for edge in edges}

    def _times(self, operations: Sequence[Operation], part: RankWork) -> list[OperationWork[float]]:
        return [
            OperationWork(name, kind, *(kernel_seconds(kernels, self.machine) for kernels in passes))
            for name, kind, *passes in work_of(operations, part)
        ]

    def _seconds(self, formula: Callable[..., None], axis: str, *inputs: Any, **options: Any) -> float:
        """Seconds of the communication that a formula of `traffic_account` adds on one axis."""
        if getattr(self.layout, axis) == 1:
            return 0.0
        placement = axis_of(self.layout, axis, self.machine.per_node)
        return seconds_of(rows_of(formula, *inputs, **options), placement, self.machine)

    def block(self, number: int, ac: ACConfig) -> PieceTime:
        recomputed = frozenset(ac.recomputed(self.operations, number=number))
        forward, inputs, weights = (sum(column) for column in list(zip(*self.times, strict=True))[2:])
        again = [time for time in self.times if time.name in recomputed]
        repeated = sum(time.forward for time in again)
        context_forward, context_backward = self.context
        if any(time.kind == "attention" for time in again):
            context_backward += context_forward
        tensor_forward, tensor_backward = self._tensor(number, ac)
        # Experts need the exchanged rows immediately, so no computation hides the exchange.
        tensor_forward += self.exchange
        tensor_backward += self.exchange * (2 if ac.repeats_collective(EXCHANGE, number=number) else 1)
        ahead, back = self._host(recomputed)
        forward += max(0.0, ahead - forward - tensor_forward - context_forward)
        inputs += max(0.0, back - inputs - weights - repeated - tensor_backward - context_backward)
        return PieceTime(
            *(forward, inputs, weights, repeated, tensor_forward, tensor_backward, context_forward, context_backward),
            *(ahead, back),
        )

    @functools.cached_property
    def async_products(self) -> AsyncProducts:
        """The products that torch fuses with a collective, as `tests/compile/test_async_tensor.py` counts them."""
        reading: dict[str, list[OperationWork[float]]] = {}
        sums, cast = list[OperationWork[float]](), set[str]()
        for operation, time in zip(self.operations, self.times, strict=True):
            path = f"{self.part.prefix}{operation.layer or operation.name}"
            style = self.part.plan.style_of(path)
            if path in self.part.products and not self.part.casts_part:
                # A cast between an operand's gather and its product prevents the fusion of the two.
                cast.add(operation.name)
            if style == "colwise":
                reading.setdefault(operation.keeps[0].name, []).append(time)
            elif style == "rowwise":
                sums.append(time)
        groups = [group for group in reading.values() if cast.isdisjoint(time.name for time in group)]
        return AsyncProducts(
            gathers=[sum(time.forward for time in group) for group in groups],
            sums=[time.forward for time in sums],
            gradient_gathers=[time.inputs for time in sums if time.name not in cast],
        )

    def _host(self, recomputed: frozenset[str]) -> tuple[float, float]:
        """Seconds that the host needs for the forward and the backward pass of a block.

        The host starts kernels ahead of the device: a pass takes as long as the slower of host and device.
        """
        if self.recipe.compile.records_graphs:
            return 0.0, 0.0
        ahead, back, weights = (sum(column) for column in zip(*self.host.values(), strict=True))
        repeated = sum(self.host[name][0] for name in recomputed)
        hook, hops = self.machine.efficiencies.hook_seconds, self.layout.context - 1
        kernel = self.machine.efficiencies.host_seconds
        ahead += kernel * _MERGE_KERNELS * hops
        back += kernel * _MERGE_BACKWARD_KERNELS * hops
        # Each hop of a ring exchanges keys and values; in the backward pass it exchanges their gradients too.
        ahead += hook * (self.collectives / 2 + hops)
        back += weights + repeated + hook * (self.collectives / 2 + 2 * hops)
        return ahead, back

    def _edge(self, operation: Operation, *, last: bool) -> PieceTime:
        """Time of a piece before or after the blocks; `last`: the piece also computes the loss."""
        parallelism, chunk = self.recipe.parallelism, self.recipe.loss_chunk
        chunks = math.ceil(math.prod(operation.output[:-1]) / self.layout.context / chunk) if last and chunk else 1
        part = replace(self.part, prefix="", fused=False, chunks=chunks)
        if operation.name in self.step.fp32_parts:
            part = replace(part, dtype="float32", share=replace(part.share, element_bytes=4))
        (time,) = self._times([operation], part)
        forward, inputs = time.forward, time.inputs
        tensor = self._seconds(add_tensor, "tensor", self.step, (operation.name,)) / 2
        if last:
            splits = self.layout.context * (self.layout.tensor if parallelism.loss_parallel else 1)
            fused = self.recipe.compile.fuses_loss
            bytes_, launches = (_COMPILED_LOSS_BYTES, _COMPILED_LOSS_KERNELS) if fused else (_LOSS_BYTES, _LOSS_KERNELS)
            moved = math.prod(operation.output) / splits * bytes_
            loss = kernel_seconds([KernelGroup(0.0, "", moved / 2, launches / 2, fused)], self.machine)
            forward, inputs = forward + loss, inputs + loss
            if chunk:
                # With chunks, the forward pass of the loss computes the gradients too.
                return PieceTime(forward + inputs + time.weights, 0.0, 0.0, 0.0, tensor, tensor)
        return PieceTime(forward, inputs, time.weights, 0.0, tensor, tensor)

    def _tensor(self, number: int, ac: ACConfig) -> tuple[float, float]:
        """Exposed seconds of tensor parallelism in the forward pass, and in the backward pass with recomputation."""
        half = sum(self.tensor.values()) / 2
        styles = [STYLES[style] for path, style in self.step.account.tensor_plan.items() if is_in_block(path)]
        gathers, sums = sum(style.gathers for style in styles), sum(style.sums for style in styles)
        if not self.tensor or not gathers + sums:
            return half, half
        # A block ends with a product and its sum; recomputation repeats neither of these two.
        repeated_sums = max(0, sums - int(self.layout.expert == 1))
        repeats_gathers, repeats_sums = repeats_in_block(self.recipe, ac, number)
        each = {kind: seconds / (gathers + sums) for kind, seconds in self.tensor.items()}
        gather, total = each.get("all_gather", 0.0), each.get(self.step.scatter, 0.0)
        if not self.recipe.parallelism.sequence_parallel:
            return half, half + repeated_sums * repeats_sums * each["all_reduce"]
        if not self.recipe.parallelism.async_tensor:
            return half, half + gathers * repeats_gathers * gather + repeated_sums * repeats_sums * total
        products = self.async_products
        forward = self._beside(products.gathers, gathers, gather), self._beside(products.sums, sums, total)
        backward = self._beside(products.gradient_gathers, sums, gather) + gathers * total
        backward += repeats_gathers * forward[0]
        backward += repeats_sums * self._beside(products.sums[:repeated_sums], repeated_sums, total)
        return sum(forward), backward

    def _beside(self, products: Sequence[float], count: int, each: float) -> float:
        """Exposed seconds of `count` collectives: each runs beside one product; without a product it runs alone."""
        hidden = sum(exposed(product, each, self.machine) for product in products)
        return hidden + max(0, count - len(products)) * each

    def _context(self) -> tuple[float, float]:
        """Seconds of context parallelism, forward and backward: exposed communication, and merges of partial results.
        A ring exposes max(0, transfer − attention) for each hop; nothing hides an all-gather.
        """
        sent = self._seconds(add_context, "context", self.step, Coordinate(), (self.facts.block,))
        ranks, (attention, backward), (forward, back) = self.layout.context, self.ring, self._merges()
        hidden = (ranks - 1) / ranks if self.recipe.parallelism.context_method == "ring" else 0.0
        # The forward pass sends keys and values; the backward pass sends them again, and as many gradients.
        return max(0.0, sent / 3 - attention * hidden) + forward, max(0.0, sent * 2 / 3 - backward * hidden) + back

    def _merges(self) -> tuple[float, float]:
        """Seconds to merge the partial results of context parallelism, forward and backward, on the last rank.

        In each hop, the last rank merges all of its rows. Attention to its own first chunk counts as half a hop.
        """
        share, ranks, account = self.part.share, self.layout.context, self.step.account
        if ranks == 1:
            return 0.0, 0.0
        gathers = self.recipe.parallelism.context_method != "ring"
        hops = 0.5 + (1 if gathers else ranks - 1)
        rows = self.step.tokens / share.tensor * account.head_dim
        queries, keys = rows * account.heads, 2 * rows * account.kv_heads
        forward = queries * (_RING_ENDS + _MERGE * hops)
        # All ranks' keys get gradients. An all-gather also copies the keys into order, and their gradients back.
        copies = 4 * keys * (ranks - 1) if gathers else 0
        back = queries * (_RING_ENDS + _MERGE_QUERIES * hops) + keys * _MERGE_KEYS * (ranks - 0.5) + copies
        return (
            kernel_seconds([KernelGroup(0.0, "", forward + copies, _MERGE_KERNELS * hops, False)], self.machine),
            kernel_seconds([KernelGroup(0.0, "", back, _MERGE_BACKWARD_KERNELS * hops, False)], self.machine),
        )


def exposed(compute: float, exchange: float, machine: Machine) -> float:
    """Seconds that communication X adds to a concurrent computation C: κ·min(C, X) + |C − X| − C."""
    return machine.efficiencies.overlap * min(compute, exchange) + abs(compute - exchange) - compute


def _inside(layout: Layout) -> Layout:
    """A layout with only the degrees that cut a block. The other axes are further out: they do not change its nodes."""
    return Layout(context=layout.context, tensor=layout.tensor, expert=layout.expert)


def model_time(recipe: Recipe, machine: Machine) -> ModelTime:
    config = recipe.parallelism
    key = (
        *(recipe.model, recipe.precision, recipe.compile, recipe.microbatch, recipe.training.seq_len),
        *(_inside(recipe.layout), recipe.cluster.accelerator, recipe.cluster.device, recipe.loss_chunk),
        *(config.sequence_parallel, config.loss_parallel, config.async_tensor, config.context_method),
    )
    times = _model_time(_shaped(Seen(key, recipe), machine), recipe.ac)
    return _without_frozen(times, recipe.training.freeze) if recipe.training.freeze else times


@functools.lru_cache(maxsize=1024)
def _without_frozen(times: ModelTime, freeze: tuple[str, ...]) -> ModelTime:
    """The times without gradients of frozen weights, and without a backward pass for pieces that have none."""
    account = with_frozen(model_facts(times.model).account, freeze)

    def trained(piece: str, time: PieceTime) -> PieceTime:
        if piece in account.idle:
            ahead = {name: getattr(time, name) for name in PieceTime._fields if name.endswith("forward")}
            return PieceTime(**{"inputs": 0.0, "weights": 0.0, "recomputed": 0.0, **ahead})
        matrices = {
            name: math.prod(shape)
            for name, shape in account.parameters.items()
            if name.startswith(f"{piece}.") and len(shape) > 1
        }
        if not matrices:
            return time
        share = sum(size for name, size in matrices.items() if name not in account.frozen) / sum(matrices.values())
        return time._replace(weights=time.weights * share)

    kinds: dict[PieceTime, int] = {}
    blocks = (trained(block_name(number), times.kinds[kind]) for number, kind in enumerate(times.kind_of))
    kind_of = tuple([kinds.setdefault(block, len(kinds)) for block in blocks])
    edges = {name: trained(name, time) for name, time in times.edges.items()}
    made = replace(times, kinds=tuple(kinds), kind_of=kind_of, edges=edges)
    return replace(made, whole=total(made, kind_of, edges))


@functools.lru_cache(maxsize=4096)
def _shaped(seen: Seen, machine: Machine) -> _Shaped:
    return _Shaped(seen.recipe, machine)


@functools.lru_cache(maxsize=16384)
def _model_time(shaped: _Shaped, ac: ACConfig) -> ModelTime:
    first, kind_of = treatments(ac, shaped.facts.account.layers)
    kinds = tuple(shaped.block(number, ac) for number in first)
    model, seq_len = shaped.recipe.model, shaped.recipe.training.seq_len
    times = ModelTime(
        model=model,
        seq_len=seq_len,
        kinds=kinds,
        kind_of=kind_of,
        edges=shaped.edges,
        once=shaped.once,
        whole=kinds[0],
    )
    return replace(times, whole=total(times, kind_of, shaped.edges))
