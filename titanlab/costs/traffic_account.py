"""Formulas for the communication of a step, from the model's account, the layout and a few options.

They count every operation; tests compare them with traced steps. Symbols: M microbatches, L blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from titanlab.costs.account import ModelAccount
from titanlab.costs.block_names import is_in_block
from titanlab.costs.context_traffic import context_of_block, forward_context_of_block
from titanlab.costs.layout import hidden_shape
from titanlab.costs.loss_chunk import chunks_of
from titanlab.costs.shard_account import STACK, cuts_of, gathered_part
from titanlab.costs.step import Coordinate, Step
from titanlab.costs.tensor_styles import STYLES, cut_dim, has_partial_gradient, parameter_style
from titanlab.costs.traffic_table import Row, Traffic

# The step's totals: loss, norm, labels and a flag for each signal, in float64 (`titanlab.training.totals`).
TOTALS_BYTES = 7 * 8
_LOSS_BYTES = 2 * 4  # two float32 numbers per token, see `titanlab.parallelism.loss`


def step_traffic(step: Step, rank: Coordinate) -> list[Row]:
    """The communication of one rank in a step, before the optimizer."""
    traffic = Traffic()
    for number, pieces in step.stages_of(rank):
        if step.replicas_by_ddp:
            add_replicas(step, traffic)
        else:
            add_sharding(step, rank, number, pieces, traffic)
        add_tensor(step, pieces, traffic)
        sum_whole_gradients(step, rank, pieces, traffic)
        add_context(step, rank, pieces, traffic)
        add_exchange(step, pieces, traffic)
        _add_repeated(step, rank, pieces, traffic)
        _pipeline(step, number, traffic)
    traffic.add(step.axis("world"), "all_reduce", TOTALS_BYTES + _counts_bytes(step.account), ranks=step.layout.world)
    return traffic.rows()


def _counts_bytes(account: ModelAccount) -> int:
    """Of each block the count of each expert's tokens, and the sum of entropies, in float64."""
    return 0 if account.experts is None else account.layers * (account.experts.count + 1) * 8


def add_replicas(step: Step, traffic: Traffic) -> None:
    """All gradients once per step. In a run's first step DDP has one bucket, later buckets of 25 MiB."""
    size = step.account.parameter_count * step.master_bytes
    traffic.add(step.axis("replicate"), "all_reduce", size, ranks=step.layout.replicate)


def add_sharding(step: Step, rank: Coordinate, number: int, pieces: Sequence[str], traffic: Traffic) -> None:
    """Gathers and reductions of FSDP2's units: each block is a unit, and the rest of a stage another.

    A part with another dtype than the rest is a separate unit, treated like the rest. The last block and the rest are
    gathered once per step; so are the other blocks if they stay gathered, else twice per microbatch. Without a
    pipeline that is 2·M·(L − 1) + 2 all-gathers with resharding, else L + 1; and L + 1 reduce-scatters.
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
        times = gathers(step, number, reshards=step.reshards and unit in blocks[:-1])
        for axis, ranks, members in (
            ("fsdp", step.layout.fsdp, dense),
            ("expert_shard", step.layout.expert_shard, experts),
        ):
            if not members:
                continue
            elements = {name: _padded(step, rank, name) for name in members}
            size = sum(elements.values())
            gathered = sum(n * (1 if name in step.float8_gathered else compute) for name, n in elements.items())
            traffic.add(step.axis(axis), "all_gather", gathered, ranks=ranks, times=times)
            traffic.add(step.axis(axis), step.scatter, size * reduce, ranks=ranks)
            if step.layout.replicate > 1:
                shard = size // ranks * reduce
                traffic.add(step.axis("replicate"), "all_reduce", shard, ranks=step.layout.replicate)


def gathers(step: Step, number: int, *, reshards: bool) -> int:
    """Number of gathers of a unit in a step."""
    if not step.orders:
        return step.microbatches * 2 if reshards else 1
    # A pipeline keeps parameters gathered by a backward until the end of the step or until another forward frees them.
    times, whole = 0, False
    for kind in step.orders[number]:
        if kind in ("F", "B", "I"):
            times += not whole
            whole = not (kind == "F" and reshards)
    return times


def add_tensor(step: Step, pieces: Sequence[str], traffic: Traffic) -> None:
    """Sums of activations and their gradients (arXiv 1909.08053, 2205.05198), and the loss.

    With sequence parallelism, reading the stream is an all-gather forward and a reduce-scatter backward, and writing
    it is the reverse. Without it, reading is an all-reduce backward, and writing an all-reduce forward.
    """
    ranks, axis = step.layout.tensor, step.axis("tensor")
    if ranks == 1:
        return
    times = step.microbatches
    for piece in pieces:
        size = step.tokens * step.account.dim * step.element_bytes(piece)
        sums = sum(STYLES[style].gathers + STYLES[style].sums for style in step.account.plan.styles_in(piece))
        for kind in ("all_gather", step.scatter) if step.sequence_parallel else ("all_reduce",):
            traffic.add(axis, kind, size, ranks=ranks, times=times * sums)
    if step.account.pieces[-1] in pieces:
        part = -(-step.account.vocab_size // ranks)
        logits = step.tokens * part * ranks * step.element_bytes(step.account.pieces[-1])
        if step.loss_parallel:
            for tokens in chunks_of(step.tokens, step.loss_chunk, pads=step.pads_chunks):
                traffic.add(axis, "all_gather", tokens * ranks * _LOSS_BYTES, ranks=ranks, times=times)
        else:
            traffic.add(axis, "all_gather", logits, ranks=ranks, times=times)


def sum_whole_gradients(step: Step, rank: Coordinate, pieces: Sequence[str], traffic: Traffic) -> None:
    """The one reduction of a step that sums partial gradients of whole parameters over tensor ranks.

    They come from a share of the tokens (sequence parallelism) or from a rank's heads.
    """
    if step.layout.tensor == 1:
        return
    plan, cut = step.account.tensor_plan, step.sequence_parallel
    names = [n for n in _names(step.account, pieces) if has_partial_gradient(plan, n, sequence_parallel=cut)]
    if size := sum(_whole_shard(step, rank, name) for name in names):
        size *= max(step.master_bytes, step.reduce_bytes)
        traffic.add(step.axis("tensor"), "all_reduce", size, ranks=step.layout.tensor)


def _whole_shard(step: Step, rank: Coordinate, name: str) -> int:
    """This rank's elements of an uncut parameter, without FSDP2's padding; 0 for a cut parameter."""
    if _cut_dim(step.account, name) is not None:
        return 0
    rows, *rest = step.account.parameters[name]
    if step.layout.data_parallelism(mixed=step.mixed) == "fsdp2":
        part = -(-rows // step.layout.fsdp)
        rows = max(0, min(part, rows - rank.fsdp * part))
    return rows * math.prod(rest)


def add_context(step: Step, rank: Coordinate, pieces: Sequence[str], traffic: Traffic) -> None:
    """Keys and values in forward and backward, and their gradients."""
    if step.layout.context > 1:
        for block in (piece for piece in pieces if is_in_block(piece)):
            context_of_block(step, block, rank, traffic)


def add_exchange(step: Step, pieces: Sequence[str], traffic: Traffic, *, only_forward: bool = False) -> None:
    """Rows to the ranks that have their experts and back, and the same for gradients.

    A rank sends a row for each expert of each of its tokens. It gets as many if the load is balanced, as is assumed.
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
    """What the recomputation of blocks repeats; the sum of a block's last product is not computed again."""
    layout, axis = step.layout, step.axis("tensor")
    for block, repeats in ((piece, step.repeats[piece]) for piece in pieces if piece in step.repeats):
        if repeats.context and layout.context > 1:
            forward_context_of_block(step, block, rank, traffic)
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
    """Hidden states to the next stage and their gradients to the previous one, unless it is on the same rank."""
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
    """Elements of the parameters of some pieces after tensor parallelism, with FSDP2's padding, over all its shards."""
    return sum(_padded(step, rank, name) for name in _names(step.account, pieces))


def _names(account: ModelAccount, pieces: Sequence[str]) -> list[str]:
    """Parameters of some pieces."""
    begins = tuple(f"{piece}." for piece in pieces)
    return [name for name in account.parameters if name.startswith(begins)]


def _cut_dim(account: ModelAccount, parameter: str) -> int | None:
    """The dim that tensor parallelism cuts; None for whole parameters: norms, and biases that follow a sum."""
    return cut_dim(parameter_style(account, parameter), len(account.parameters[parameter]))


def _padded(step: Step, rank: Coordinate, name: str) -> int:
    """Elements of a parameter that FSDP2 gathers."""
    cuts = cuts_of(step.account, name, step.layout)
    number = rank.tensor if cuts.tensor == step.layout.tensor else 0  # of experts all parts are equal
    return math.prod(gathered_part(step.account, name, **cuts._asdict(), number=number))
