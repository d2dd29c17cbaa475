"""Formulas that give a table of a step's communication, from the model's account, the layout and a few options.

The formulas count every operation; tests compare them with traced steps. Symbols: M microbatches, L blocks.

The bytes of an operation are counted for its whole tensor:

- `all_reduce`, `broadcast`, `reduce`: the tensor;
- `all_gather`, `gather`: the output, with the parts of all ranks;
- `reduce_scatter`, `scatter`, `all_to_all`: the input;
- `send`, `recv`: the message.

Padding counts, since it is sent. The table also estimates the bytes that the rank itself sends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titanlab.costs.account import (
    STACK,
    STYLES,
    ModelAccount,
    cut_dim,
    cuts_of,
    gathered_part,
    has_partial_gradient,
    is_in_block,
    parameter_style,
)
from titanlab.costs.layout import AXES, FOLD, Layout, hidden_shape
from titanlab.costs.setting import chunks_of

# Bytes of a step's totals: loss, norm, labels and a flag for each signal, in float64 (`titanlab.train.totals`).
TOTALS_BYTES = 7 * 8
_LOSS_BYTES = 2 * 4  # two float32 numbers per token, see `titanlab.parallelism.loss`


def step_traffic(step: Step, rank: Coordinate) -> list[TrafficRow]:
    """The communication of one rank in a step, before the optimizer."""
    traffic = Traffic()
    for number, pieces in step.stages_of(rank):
        if step.replicas_by_ddp:
            # Count DDP's gradients as one bucket, as in a run's first step; in later steps DDP has buckets of 25 MiB.
            frozen = sum(math.prod(step.account.parameters[name]) for name in step.account.frozen)
            size = (step.account.parameter_count - frozen) * step.master_bytes
            times = step.microbatches if step.reduces_each else 1
            traffic.add(step.axis("replicate"), "all_reduce", size, ranks=step.layout.replicate, times=times)
        else:
            add_sharding(step, rank, number, pieces, traffic)
        add_tensor(step, pieces, traffic)
        sum_whole_gradients(step, rank, pieces, traffic)
        add_context(step, rank, pieces, traffic)
        add_exchange(step, pieces, traffic)
        _add_repeated(step, rank, pieces, traffic)
        _pipeline(step, number, traffic)
    experts = step.account.experts
    # For each block: the count of each expert's tokens, and one sum of entropies, in float64.
    counts = 0 if experts is None else step.account.layers * (experts.count + 1) * 8
    traffic.add(step.axis("world"), "all_reduce", TOTALS_BYTES + counts, ranks=step.layout.world)
    return traffic.rows()


def add_sharding(step: Step, rank: Coordinate, number: int, pieces: Sequence[str], traffic: Traffic) -> None:
    """Add gathers and reductions of FSDP2's units: each block is a unit; the other pieces of a stage together are one.

    But each piece in `fp32_parts` is a unit of its own. All units outside blocks and the last blocks (by
    default one) are gathered once per step. Earlier blocks are gathered twice per microbatch with resharding, else once
    per step. Without a pipeline that is 2·M·(L − 1) + 2 all-gathers with resharding, else L + 1; and L + 1
    reduce-scatters, or M·(L + 1) if each microbatch reduces. Replicas sum gradients once per step. Frozen parameters
    are gathered, but not reduced. Blocks before all trained parameters are not gathered for a backward pass.
    """
    blocks = [(piece,) for piece in pieces if is_in_block(piece)]
    edges = [piece for piece in pieces if not is_in_block(piece)]
    # A tied table and its head are one parameter: both are in `fp32_parts` or neither.
    parts = [(piece,) for piece in edges if piece in step.fp32_parts]
    rest = tuple(piece for piece in edges if piece not in step.fp32_parts)
    for unit in (*blocks, *parts, rest):
        names = _names(step.account, unit)
        if not names:
            continue
        experts = [name for name in names if parameter_style(step.account, name) == STACK]
        dense = [name for name in names if name not in experts]
        compute, reduce = (4, 4) if unit[0] in step.fp32_parts else (step.compute_bytes, step.reduce_bytes)
        after = blocks[blocks.index(unit) + 1 :][: max(1, step.prefetch)] if unit in blocks else []
        times = gathers(
            step,
            number,
            reshards=step.reshards and unit in blocks[: max(0, len(blocks) - step.gathered_blocks)],
            idle=unit[0] in step.account.idle,
            # While a block's backward runs, FSDP2 gathers the blocks before it.
            prefetched=any(block not in step.account.idle for (block,) in after),
        )
        each = step.reduces_each and (unit in blocks or not step.orders)
        for axis, ranks, members in (
            ("fsdp", step.layout.fsdp, dense),
            ("expert_shard", step.layout.expert_shard, experts),
        ):
            if not members:
                continue
            elements = {name: _padded(step, rank, name) for name in members}
            gathered = sum(n * (1 if name in step.float8_gathered else compute) for name, n in elements.items())
            traffic.add(step.axis(axis), "all_gather", gathered, ranks=ranks, times=times)
            size = sum(n for name, n in elements.items() if name not in step.account.frozen)
            if not size:
                continue
            scatters = step.microbatches if each else 1
            traffic.add(step.axis(axis), step.scatter, size * reduce, ranks=ranks, times=scatters)
            if step.layout.replicate > 1:
                shard = size // ranks * reduce
                traffic.add(step.axis("replicate"), "all_reduce", shard, ranks=step.layout.replicate)


def gathers(step: Step, number: int, *, reshards: bool, idle: bool = False, prefetched: bool = False) -> int:
    """How often a unit is gathered in a step.

    Args:
        idle: the unit has no backward pass.
        prefetched: the backward pass of the next unit gathers this unit ahead; the next forward pass uses it.
    """
    if not step.orders:
        backward = step.microbatches if not idle else int(prefetched)
        return step.microbatches + backward if reshards else 1
    # In a pipeline, parameters that a backward has gathered stay gathered until a forward frees them or the step ends.
    times, whole = 0, False
    for kind in step.orders[number]:
        if kind == "F" or (kind in ("B", "I") and (prefetched or not idle)):
            times += not whole
            whole = not (kind == "F" and reshards)
    return times


def add_tensor(step: Step, pieces: Sequence[str], traffic: Traffic) -> None:
    """Add tensor parallelism's collectives for activations, gradients (arXiv 1909.08053, 2205.05198) and the loss.

    To read the residual stream, a module needs an all-gather forward and a reduce-scatter backward; to write it, the
    reverse. Without sequence parallelism, reading is an all-reduce backward, and writing is an all-reduce forward.
    """
    ranks, axis = step.layout.tensor, step.axis("tensor")
    if ranks == 1:
        return
    times = step.microbatches
    for piece in pieces:
        size = step.tokens * step.account.dim * step.element_bytes(piece)
        styles = [STYLES[style] for style in step.account.plan.styles_in(piece)]
        ahead = sum(style.gathers for style in styles), sum(style.sums for style in styles)
        back = (0, 0) if piece in step.account.idle else ahead[::-1]
        gathers, sums = (ahead[place] + back[place] for place in (0, 1))
        if step.sequence_parallel:
            traffic.add(axis, "all_gather", size, ranks=ranks, times=times * gathers)
            traffic.add(axis, step.scatter, size, ranks=ranks, times=times * sums)
        else:
            traffic.add(axis, "all_reduce", size, ranks=ranks, times=times * (ahead[1] + back[1]))
    if step.account.pieces[-1] in pieces:
        part = -(-step.account.vocab_size // ranks)
        logits = step.tokens * part * ranks * step.element_bytes(step.account.pieces[-1])
        if step.loss_parallel:
            for tokens in chunks_of(step.tokens, step.loss_chunk, pads=step.pads_chunks):
                traffic.add(axis, "all_gather", tokens * ranks * _LOSS_BYTES, ranks=ranks, times=times)
        else:
            traffic.add(axis, "all_gather", logits, ranks=ranks, times=times)


def sum_whole_gradients(step: Step, rank: Coordinate, pieces: Sequence[str], traffic: Traffic) -> None:
    """Add the one all-reduce of a step that sums partial gradients of uncut parameters over tensor ranks.

    The gradients are partial because each rank has a share of the tokens (sequence parallelism) or of the heads.
    """
    if step.layout.tensor == 1:
        return
    plan, cut = step.account.tensor_plan, step.sequence_parallel
    size = 0
    for name in _names(step.account, pieces):
        if name in step.account.frozen:
            continue
        rows, *rest = shape = step.account.parameters[name]
        is_whole = cut_dim(parameter_style(step.account, name), len(shape)) is None
        if is_whole and has_partial_gradient(plan, name, sequence_parallel=cut):
            if step.layout.data_parallelism(mixed=step.mixed) == "fsdp2":
                # This rank's rows, without FSDP2's padding.
                part = -(-rows // step.layout.fsdp)
                rows = max(0, min(part, rows - rank.fsdp * part))
            size += rows * math.prod(rest)
    if size:
        size *= max(step.master_bytes, step.reduce_bytes)
        traffic.add(step.axis("tensor"), "all_reduce", size, ranks=step.layout.tensor)


def add_context(
    step: Step, rank: Coordinate, pieces: Sequence[str], traffic: Traffic, *, only_forward: bool = False
) -> None:
    """Add context parallelism's transfers of keys, values and their gradients, for all microbatches."""
    ranks, axis, times = step.layout.context, step.axis("context"), step.microbatches
    if ranks == 1:
        return
    after, before = ranks - 1 - rank.context, rank.context
    heads = step.account.kv_heads // step.layout.tensor
    for block in (piece for piece in pieces if is_in_block(piece)):
        ends = only_forward or block in step.account.idle
        # Keys and values are transferred in the forward pass, and again in the backward pass.
        passes = 1 if ends else 2
        # Bytes of a rank's keys (its values have as many): of all its tokens, and of the first half of them.
        whole = step.tokens * heads * step.account.head_dim * step.element_bytes(block)
        half = whole // 2
        if step.context_method == "all_gather":
            traffic.add(axis, "all_gather", 2 * ranks * whole, ranks=ranks, times=times * passes)
            if not ends:
                returned = 2 * (after * whole + before * half)
                traffic.add(axis, "all_to_all", returned, ranks=ranks, times=times, own=0)
            continue
        # A rank first sends its own keys and values, then those that it has received. Of the keys and values of ranks
        # before it, a receiver gets only the first half.
        sent = (0, ranks - 1) if before == 0 else (min(after + 1, ranks - 1), before - 1)
        messages = [("send", sent, passes), ("recv", (after, before), passes)]
        if not ends:
            # Gradients of received keys and values go to their owners; those of this rank's keys and values arrive.
            messages += [("send", (after, before), 1), ("recv", (before, after), 1)]
        for kind, (wholes, halves), count in messages:
            traffic.add(axis, kind, whole, ranks=ranks, times=2 * times * count * wholes)
            traffic.add(axis, kind, half, ranks=ranks, times=2 * times * count * halves)


def add_exchange(step: Step, pieces: Sequence[str], traffic: Traffic, *, only_forward: bool = False) -> None:
    """Add the exchange of expert parallelism: rows go to the ranks of their experts and back, and so do gradients.

    A rank sends one row for each expert of each token. With a balanced load, as assumed here, it gets as many rows.
    """
    experts, layout = step.account.experts, step.layout
    if experts is None or layout.expert == 1:
        return
    rows = step.tokens // layout.tensor * experts.active
    axis, times = step.axis("expert"), step.microbatches
    for block in (piece for piece in pieces if is_in_block(piece)):
        size = rows * step.account.dim * step.element_bytes(block)
        traffic.add(axis, "all_to_all", experts.count * 8, ranks=layout.expert, times=times)
        traffic.add(axis, "all_to_all", size, ranks=layout.expert, times=times * (2 if only_forward else 4))


def _add_repeated(step: Step, rank: Coordinate, pieces: Sequence[str], traffic: Traffic) -> None:
    """Add the communication that recomputation of blocks repeats; the sum of a block's last product is not repeated."""
    layout, axis = step.layout, step.axis("tensor")
    repeated = [piece for piece in pieces if piece in step.repeats and piece not in step.account.idle]
    for block, repeats in ((piece, step.repeats[piece]) for piece in repeated):
        if repeats.context:
            add_context(step, rank, (block,), traffic, only_forward=True)
        if repeats.exchange:
            add_exchange(step, (block,), traffic, only_forward=True)
        if layout.tensor == 1:
            continue
        styles = [STYLES[style] for style in step.account.plan.styles_in(block)]
        gathers = sum(style.gathers for style in styles) if repeats.gathers and step.sequence_parallel else 0
        # With expert parallelism a block does not end with a sum.
        last = int(layout.expert == 1)
        sums = max(0, sum(style.sums for style in styles) - last) if repeats.sums else 0
        size, kind = step.tokens * step.account.dim * step.element_bytes(block), step.scatter
        for name, times in (("all_gather", gathers), (kind if step.sequence_parallel else "all_reduce", sums)):
            traffic.add(axis, name, size, ranks=layout.tensor, times=step.microbatches * times)


def _pipeline(step: Step, number: int, traffic: Traffic) -> None:
    """Add hidden states for the next stage and gradients for the previous stage, if that stage is on another rank."""
    shape = hidden_shape(
        step.layout,
        microbatch=step.microbatch,
        seq_len=step.seq_len,
        dim=step.account.dim,
        sequence_parallel=step.sequence_parallel,
    )
    size = math.prod(shape) * step.compute_bytes
    for neighbour in (number - 1, number + 1):
        if 0 <= neighbour < len(step.placement) and step.placement[neighbour] != step.placement[number]:
            for kind in ("send", "recv"):
                traffic.add(step.axis("pipeline"), kind, size, ranks=step.layout.pipeline, times=step.microbatches)


def parameter_elements(step: Step, rank: Coordinate, pieces: Sequence[str]) -> int:
    """Elements of some pieces' parameters on a tensor-parallel rank, summed over FSDP2's shards, with its padding."""
    return sum(_padded(step, rank, name) for name in _names(step.account, pieces))


def _names(account: ModelAccount, pieces: Sequence[str]) -> list[str]:
    begins = tuple(f"{piece}." for piece in pieces)
    return [name for name in account.parameters if name.startswith(begins)]


def _padded(step: Step, rank: Coordinate, name: str) -> int:
    """Elements of a parameter that FSDP2 gathers, with padding."""
    cuts = cuts_of(step.account, name, step.layout)
    number = rank.tensor if cuts.tensor == step.layout.tensor else 0  # for experts all parts are equal
    return math.prod(gathered_part(step.account, name, **cuts._asdict(), number=number))


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """A rank's numbers on the axes whose ranks have different communication.

    Attributes:
        fsdp: the number of the rank's FSDP2 shard; the last shards may be smaller.
    """

    pipeline: int = 0
    context: int = 0
    tensor: int = 0
    fsdp: int = 0


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The communication of a block's forward pass that recomputation in its backward pass repeats.

    Attributes:
        gathers, sums: tensor parallelism's gathers and sums of the residual stream.
        context: context parallelism's transfers of keys and values.
        exchange: expert parallelism's exchange of tokens.
    """

    gathers: bool = False
    sums: bool = False
    context: bool = False
    exchange: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the formulas need to know about a step.

    Attributes:
        seq_len: tokens of a sequence, over all its ranks.
        microbatch: sequences of one forward pass.
        microbatches: forward passes of one rank in a step.
        compute_bytes: bytes of an element of gathered parameters and of activations.
        reduce_bytes: bytes of an element of a gradient while it is summed over ranks.
        master_bytes: bytes of an element of a stored parameter, and of its summed gradient.
        fp32_parts: pieces that compute and reduce in float32 even if the rest does not.
        float8_gathered: names of the parameters that FSDP2 gathers in one byte per element.
        mixed: parameters are cast before they compute; then FSDP2 sums the replicas' gradients instead of DDP.
        reshards: blocks free gathered parameters between forward and backward, except the last `gathered_blocks`.
        prefetch: number of blocks that FSDP2 gathers ahead; 0 counts as 1.
        reduces_each: gradients are reduced after each microbatch; in a pipeline, only those of blocks.
        sequence_parallel, loss_parallel, context_method: the values of the config `parallelism`.
        loss_chunk: tokens for which the loss is computed at once; 0: all of a microbatch.
        pads_chunks: the loss's last chunk is padded to the size of the others.
        accelerator: `cpu` or `cuda`. On CPU an all-to-all replaces gloo's reduce-scatter, which has twice the traffic.
        stages: for each stage of a pipeline, its pieces of the model; empty: one stage has all pieces.
        placement: for each stage, its rank on the pipeline axis.
        orders: for each stage, its actions in order: `F` forward, `B` or `I` backward; others are ignored. Empty: one
            microbatch after another.
        repeats: block → the communication that its recomputation repeats; other blocks repeat nothing.
    """

    account: ModelAccount
    layout: Layout
    seq_len: int
    microbatch: int
    microbatches: int = 1
    compute_bytes: int = 4
    reduce_bytes: int = 4
    master_bytes: int = 4
    fp32_parts: Sequence[str] = ()
    float8_gathered: Collection[str] = ()
    mixed: bool = False
    reshards: bool = True
    gathered_blocks: int = 1
    prefetch: int = 0
    reduces_each: bool = False
    sequence_parallel: bool = True
    loss_parallel: bool = True
    loss_chunk: int = 0
    pads_chunks: bool = False
    context_method: str = "ring"
    accelerator: str = "cuda"
    stages: Sequence[Sequence[str]] = ()
    placement: Sequence[int] = (0,)
    orders: Sequence[Sequence[str]] = ()
    repeats: Mapping[str, Repeats] = field(default_factory=dict)

    def element_bytes(self, piece: str) -> int:
        return 4 if piece in self.fp32_parts else self.compute_bytes

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank, before sequence parallelism cuts them."""
        return self.microbatch * self.seq_len // self.layout.context

    @property
    def scatter(self) -> str:
        return "all_to_all" if self.accelerator == "cpu" else "reduce_scatter"

    @property
    def replicas_by_ddp(self) -> bool:
        return self.layout.data_parallelism(mixed=self.mixed) == "ddp"

    def stages_of(self, rank: Coordinate) -> Iterator[tuple[int, Sequence[str]]]:
        stages = self.stages or (self.account.pieces,)
        return ((number, pieces) for number, pieces in enumerate(stages) if self.placement[number] == rank.pipeline)

    def axis(self, name: str) -> str:
        """The name of an axis's group in the traced table; if one axis has all ranks, `world` has that axis's name."""
        return _axis_name(self.layout, name)


@functools.lru_cache(maxsize=16384)
def _axis_name(layout: Layout, name: str) -> str:
    degrees = {**layout.degrees(), layout.fsdp_name: layout.fsdp}
    degrees |= {"expert_shard": layout.expert_shard, "expert": layout.expert} if layout.expert > 1 else {}
    whole = next((axis for axis, degree in degrees.items() if degree == layout.world > 1), None)
    name = layout.fsdp_name if name == "fsdp" else name
    ranks = layout.world if name == "world" else degrees[name]
    return whole if whole is not None and ranks == layout.world else name


# Bytes that a rank sends for each byte of the tensor, in units of (ranks − 1) / ranks, by the ring algorithms
# (Patarasuk & Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). In an `all_to_all` a rank keeps its own part.
_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
_RECEIVES = ("recv", "barrier")


@dataclass(frozen=True, kw_only=True)
class TrafficRow:
    """The operations of one kind on one axis, of one rank in a step.

    Attributes:
        axis: the group's axis: an axis of the layout, `shard·context` if these share a group, or `world`.
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`, `recv`, ….
        bytes: bytes of the operations' tensors.
        wire_bytes: bytes that the rank sends for these operations, by the ring algorithms.
    """

    axis: str
    kind: str
    count: int
    bytes: int
    wire_bytes: int


class Traffic:
    """Counts operations, and sums their bytes, by axis and kind."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[int]] = {}

    def add(self, axis: str, kind: str, size: int, *, ranks: int, times: int = 1, own: int | None = None) -> None:
        """Count operations.

        Args:
            ranks: size of the group. A group of one rank sends nothing, so it is not counted.
            own: bytes of one `all_to_all` that stay on the rank, because they are for itself; None: an equal part.
        """
        if ranks == 1 or times == 0:
            return
        sums = self._sums.setdefault((axis, kind), [0, 0, 0])
        sums[0] += times
        sums[1] += times * size
        sums[2] += times * (size - own if own is not None else wire_bytes(kind, size, ranks=ranks))

    def rows(self) -> list[TrafficRow]:
        """The rows of the table: axes from outermost to innermost, then the world and others; kinds by name."""
        names = (*AXES, "world")

        def order(row: TrafficRow) -> tuple[int, int, str, str]:
            # Sort axes that share a group, such as `shard·context`, after the first of them.
            first, *others = row.axis.split(FOLD)
            return (names.index(first) if first in names else len(names), len(others), row.axis, row.kind)

        rows = (
            TrafficRow(axis=axis, kind=kind, count=count, bytes=size, wire_bytes=wire)
            for (axis, kind), (count, size, wire) in self._sums.items()
        )
        return sorted(rows, key=order)


def wire_bytes(kind: str, size: int, *, ranks: int) -> int:
    """Bytes that each rank sends for an operation on `size` bytes, by the ring algorithm if the kind has one."""
    if kind in _RECEIVES:
        return 0
    return _RING[kind] * size * (ranks - 1) // ranks if kind in _RING else size


def traffic_lines(rows: Iterable[TrafficRow]) -> list[str]:
    """One line of text per axis: `shard: 12 all_gather 25.2 MB, 7 reduce_scatter 12.6 MB`."""
    by_axis: dict[str, list[str]] = {}
    for row in rows:
        by_axis.setdefault(row.axis, []).append(f"{row.count} {row.kind} {_readable(row.bytes)}")
    return [f"{axis}: {', '.join(parts)}" for axis, parts in by_axis.items()]


def traffic_metrics(rows: Iterable[TrafficRow]) -> dict[str, int]:
    """The rows as one mapping for trackers: `traffic/shard/all_gather_bytes` → bytes, and so on."""
    table = {}
    for row in rows:
        # Keys must be ASCII for trackers and shells.
        key = f"traffic/{row.axis.replace(FOLD, '_')}/{row.kind}"
        table.update({f"{key}_count": row.count, f"{key}_bytes": row.bytes, f"{key}_wire_bytes": row.wire_bytes})
    return table


def _readable(size: int) -> str:
    """Bytes in decimal units: `40 B`, `25.2 MB`."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
