"""The memory that each rank of a pipeline needs, item by item, and the memory that it reserves on its device.

The bytes of parameters, gradients and optimizer state are exact. The AC policies (`titanlab.techniques.ac`) declare the
bytes of saved activations. All other bytes are estimated from how FSDP2, autograd, the loss and the allocator work.
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
    is_in_block,
    kept_activations,
    step_traffic,
    stored_part,
    with_frozen,
)
from titanlab.plan.machine import Machine
from titanlab.plan.pipeline_time import shorter
from titanlab.plan.stages import (
    Seen,
    actions_of,
    block_operations,
    edge_operations,
    message_bytes,
    model_facts,
    parts_of,
    placement_of,
    share_of,
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
# This many blocks have gradients in the precision of the reduction: the block being reduced, and the one before it.
_REDUCED_BLOCKS = 2
# Bytes of a number in float32.
_FLOAT = 4
# Stands for no limit on the bytes of activations at a moment: it is more than any rank keeps.
_ALL_KEPT = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one rank of a pipeline at the moment of a step when it is largest.

    Attributes:
        moment: `loss`; `backward`: the begin of the backward pass, when all activations exist; `end`: the end of the
            backward pass, when all gradients exist; or `optimizer`.
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
    return tuple(_largest(recipe, _activations(recipe)))


def most_memory(recipe: Recipe) -> RankMemory:
    fullest: dict[object, RankActivations] = {}
    for own in _activations(recipe):
        if own.kept > fullest.setdefault(own.alike, own).kept:
            fullest[own.alike] = own
    return max(_largest(recipe, fullest.values()), key=lambda rank: rank.allocated)


class RankActivations(NamedTuple):
    """The activations that a rank keeps of its microbatches.

    Attributes:
        kept: the largest number of bytes of activations at one time.
        pieces: names of the pieces of the rank's stages.
        blocks: bytes of each block of the rank's stages.
        alike: key that is equal for ranks whose pieces need the same memory. A pipeline has few different keys.
    """

    rank: int
    kept: int
    pieces: tuple[str, ...]
    blocks: tuple[BlockBytes, ...]
    alike: object


def _largest(recipe: Recipe, ranks: Iterable[RankActivations]) -> Iterator[RankMemory]:
    """The memory of each rank at the moment when that rank's memory is largest."""
    known: dict[object, dict[str, dict[str, int]]] = {}
    for own in ranks:
        if own.alike not in known:
            known[own.alike] = _moments(recipe, own)
        moments, most = known[own.alike], dict[str, int]()
        for moment, items in moments.items():
            most[moment] = sum(items.values()) - max(0, items["activations"] - own.kept)
        moment = max(most, key=most.__getitem__)
        items = {**moments[moment], "activations": min(own.kept, moments[moment]["activations"])}
        yield RankMemory(rank=own.rank, moment=moment, items={name: items.get(name, 0) for name in ITEMS})


def _activations(recipe: Recipe) -> tuple[RankActivations, ...]:
    key = (
        *(recipe.model, share_of(recipe), recipe.microbatch, recipe.training.seq_len, recipe.microbatches, recipe.ac),
        *(recipe.schedule, recipe.parallelism.split, recipe.layout.pipeline, recipe.compile.fuses_blocks),
        recipe.loss_chunk > 0,
        recipe.training.freeze,
    )
    return _rank_activations(Seen(key, recipe))


@functools.lru_cache(maxsize=16384)
def _rank_activations(seen: Seen) -> tuple[RankActivations, ...]:
    recipe = seen.recipe
    ranks, schedule, account = recipe.layout.pipeline, recipe.schedule, model_facts(recipe.model).account
    shape = (recipe.model, share_of(recipe), recipe.microbatch, recipe.training.seq_len)
    kinds, kind_of = block_bytes(recipe.ac, *shape, compiled=recipe.compile.fuses_blocks)
    edges, deferred_of, hidden = edge_bytes(*shape), deferred_bytes(*shape), message_bytes(recipe)
    if recipe.loss_chunk:
        # The forward pass of the loss has already computed the gradient of the head's weight.
        deferred_of = {**deferred_of, account.head: 0}
    stages = stages_of(recipe.model, schedule, recipe.parallelism.split, ranks, recipe.training.seq_len)
    parts = [parts_of(pieces) for pieces in stages]
    # Blocks before the first trained parameter keep nothing.
    frozen, idle = recipe.training.freeze, sum(map(is_in_block, recipe.account.idle))
    blocks = [[kinds[kind_of[number]] if number >= idle else _IDLE for number in part.blocks] for part in parts]
    saved, deferred = [], []
    for number, (own, part) in enumerate(zip(blocks, parts, strict=True)):
        # A stage keeps its output until the output's gradient arrives.
        output = hidden if number < len(parts) - 1 else 0
        saved.append(output + sum([block.saved for block in own]) + sum([edges.get(piece, 0) for piece in part.edges]))
        deferred.append(len(own) * deferred_of[""] + sum([deferred_of.get(piece, 0) for piece in part.edges]))
    stages_by_rank: list[list[int]] = [[] for _ in range(ranks)]
    for number, rank in enumerate(placement_of(schedule, ranks)):
        stages_by_rank[rank].append(number)
    return tuple(
        RankActivations(
            rank=rank,
            kept=_kept(recipe, rank, [saved[number] for number in numbers], [deferred[number] for number in numbers]),
            pieces=tuple([piece for number in numbers for piece in stages[number]]),
            blocks=tuple([block for number in numbers for block in blocks[number]]),
            alike=tuple(
                [(*blocks[number], *(stages[number] if frozen else parts[number].edges)) for number in numbers]
            ),
        )
        for rank, numbers in enumerate(stages_by_rank)
    )


def _kept(recipe: Recipe, rank: int, saved: Sequence[int], deferred: Sequence[int]) -> int:
    """The largest number of bytes of activations that a rank keeps at one time.

    Args:
        saved: bytes that each stage of the rank keeps of one microbatch.
        deferred: bytes that each stage still keeps between the two halves of a split backward.
    """
    ranks, microbatches = recipe.layout.pipeline, recipe.microbatches
    if ranks == 1:
        return saved[0]
    few = shorter(recipe.schedule, ranks, microbatches)
    moments = in_flight(recipe.schedule, ranks, few, rank)
    # If a few more microbatches add no state, even more add none: then the list of all actions is not needed.
    if moments != in_flight(recipe.schedule, ranks, min(microbatches, few + ranks), rank):
        moments = in_flight(recipe.schedule, ranks, microbatches, rank)
    most: int = max([sum(map(operator.mul, moment, (*saved, *deferred))) for moment in moments])
    return most


@functools.lru_cache(maxsize=4096)
def in_flight(schedule: PipelineSchedule, ranks: int, microbatches: int, rank: int) -> frozenset[tuple[int, ...]]:
    """The different states of a rank in which it may keep the most activations.

    These are the states after the last of consecutive forward passes, and after each gradient of an input. A state
    counts microbatches: for each stage of the rank, those between their forward pass and the gradient of their input;
    then, again for each stage, those between the two halves of a split backward.
    """
    own = [stage for stage, owner in enumerate(placement_of(schedule, ranks)) if owner == rank]
    places = {stage: place for place, stage in enumerate(own)}
    stages, states, has_more = len(own), set(), False
    alive, forward, of_input, of_weight = [0] * 2 * stages, Kind.FORWARD, Kind.INPUT, Kind.WEIGHT
    for stage, kind, _ in actions_of(schedule, ranks, microbatches)[rank]:
        place = places[stage]
        if kind is forward:
            alive[place] += 1
            has_more = True
            continue
        if has_more:
            states.add(tuple(alive))
        has_more = kind is of_input
        if kind is of_weight:
            alive[place + stages] -= 1
        else:
            alive[place] -= 1
            alive[place + stages] += has_more
    return frozenset(states)


def _moments(recipe: Recipe, rank: RankActivations) -> dict[str, dict[str, int]]:
    """Bytes by item, for each moment that may need the most memory; `activations` is the most that can exist then."""
    share, hidden, own, blocks = share_of(recipe), message_bytes(recipe), rank.pieces, rank.blocks
    layout, config, formats = recipe.layout, recipe.parallelism, recipe.precision.formats()
    fsdp = layout.data_parallelism(mixed=formats.mixed) == "fsdp2"
    pieces = stored_pieces(
        *(recipe.model, recipe.precision, recipe.optimizer, layout.tensor, layout.fsdp if fsdp else 1, layout.expert),
        recipe.training.freeze,
    )
    whole = added(pieces[piece] for piece in own)
    edges = added(pieces[piece] for piece in own if not is_in_block(piece))
    block = max((pieces[piece] for piece in own if is_in_block(piece)), default=NOTHING)
    accumulates = recipe.microbatches > 1 or layout.pipeline > 1
    stored = {"parameters": whole.parameters, "optimizer": whole.optimizer}
    # FSDP2 keeps unsharded gradients between microbatches, because it reduces only after the last one.
    sums_whole = fsdp and accumulates and not recipe.reduces_each
    gathered, buffers, between, unreduced, reducing, kept = 0, 0, 0, 0, 0, 0
    # Without FSDP2 gradients are summed in place.
    gradients = whole.trained if accumulates and not sums_whole else 0
    if fsdp:
        reshards = config.frees_after_forward
        # At most these blocks are gathered at once: the `gathered_blocks`, one of which computes, and those prefetched.
        ahead = max(1, config.prefetch)
        at_once = (config.gathered_blocks + ahead) * block.gathered
        gathered = min(edges.gathered + at_once, whole.gathered) if reshards else whole.gathered
        # Each gather of FSDP2 has a buffer of its own; FSDP2 then copies the parameters out of the buffer.
        buffers = min(ahead * block.gathered, whole.gathered) if reshards else 0
        if sums_whole:
            between = unreduced = whole.unreduced
        else:
            unreduced = edges.gradients
            if accumulates:
                # FSDP2 frees the input of the last reduction only at the next reduction.
                between = edges.unreduced
            if layout.pipeline > 1:
                # In a pipeline each backward pass reduces only blocks; the other pieces keep unreduced gradients.
                unreduced, between = edges.unreduced, edges.unreduced + block.unreduced
            if accumulates and layout.replicate > 1:
                # Replicas sum gradients once per step. Until then the shards are in the precision of the reduction.
                shards = gradients // formats.master_bytes * formats.reduce_bytes
                gradients, between, unreduced = 0, between + shards, unreduced + shards
        # FSDP2 reduces the pieces outside blocks last, as one unit.
        reducing = max(block.gradients + _REDUCED_BLOCKS * block.unreduced, block.unreduced + edges.unreduced)
    if fsdp and config.symmetric_memory:
        buffers = (1 + ahead) * block.gathered + edges.gathered
        # Symmetric memory has a pool of its own, which keeps the buffers of all gathers that run at once.
        kept = buffers + max(block.unreduced, edges.unreduced)
    # Buffers for messages of pipeline parallelism, and for tensor parallelism's gathered or unsummed residual stream.
    messages = 2 * hidden if layout.pipeline > 1 else 0
    if layout.tensor > 1 and config.sequence_parallel:
        messages += 2 * hidden * layout.tensor
    together = gradients_together(recipe.model, share, recipe.microbatch, recipe.training.seq_len)
    backward = max((each.again for each in blocks), default=0) + together
    start = {**stored, "gathered parameters": gathered, "activations": _ALL_KEPT}
    moments = {
        "loss": {
            **start,
            "gradients": gradients,
            "unreduced gradients": between,
            "logits and loss": _loss(recipe, share, own),
            "communication buffers": kept + messages,
        },
        "backward": {
            **start,
            "gradients": gradients,
            "unreduced gradients": unreduced + (0 if sums_whole else reducing),
            "backward of a block": backward,
            "communication buffers": buffers + messages,
        },
        "end": {
            **start,
            "activations": max((each.saved for each in blocks), default=0),
            # A unit's unreduced gradients are freed when they are reduced: no gradient exists twice.
            "gradients": gradients if fsdp and accumulates else whole.trained,
            "unreduced gradients": unreduced + reducing,
            "backward of a block": backward,
            "communication buffers": buffers + messages,
        },
        "optimizer": {**stored, "gradients": whole.trained, "activations": 0, "communication buffers": kept},
    }
    if config.cpu_offload:
        for items in moments.values():
            items.update(dict.fromkeys(("parameters", "gradients", "optimizer"), 0))
    return moments


def _loss(recipe: Recipe, share: Share, pieces: Sequence[str]) -> int:
    """Largest number of bytes of logits, log-probabilities and their gradients at one time, in one microbatch.

    In eager mode the forward pass has the logits, their float32 copy and the log-probabilities. The backward pass has
    the log-probabilities, their gradient and the copy's gradient. A compiled loss has the logits and their gradient.
    For logits that are split over the vocabulary the result is an upper bound: it counts log-probabilities, but
    `titanlab.parallelism.loss.SplitLoss` keeps only the logits and their gradient.
    """
    account = model_facts(recipe.model).account
    last = (account.pieces or ("",))[-1]
    edges = {edge.name: edge for edge in edge_operations(recipe.model, recipe.microbatch, recipe.training.seq_len)}
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
            dim=account.dim,
            width=width,
            accelerator=share.accelerator,
            compiled=compiled,
        )
    splits = share.tensor if recipe.parallelism.loss_parallel else 1
    logits = tokens * -(-columns // splits)
    # Gathered logits exist twice: in the order of the ranks, and copied into the order of the vocabulary.
    gathered = logits * width if share.tensor > splits else 0
    copy = _FLOAT if width != _FLOAT else 0
    if splits > 1:
        forward = width + (0 if compiled else copy) + _FLOAT
        return logits * max(forward, 2 * _FLOAT + (width if copy else 0))
    return gathered + logits * (2 * width if compiled else max(width + copy + _FLOAT, 3 * _FLOAT))


class PieceBytes(NamedTuple):
    """Bytes of one rank for one or several pieces of the model.

    Attributes:
        parameters: stored parameters; a shard is padded as FSDP2 pads it.
        optimizer: state of the optimizer.
        trained: stored parameters that are not frozen.
        gathered: all parameters of the piece, in the precision in which they compute.
        gradients: gradients of all trained parameters of the piece, in the compute precision.
        unreduced: the same gradients in the precision in which ranks sum them.
        update_flops: FLOPs (not bytes) of the optimizer's matrix products.
    """

    parameters: int
    optimizer: int
    trained: int
    gathered: int
    gradients: int
    unreduced: int
    update_flops: float = 0.0


NOTHING = PieceBytes(0, 0, 0, 0, 0, 0)


def added(parts: Iterable[PieceBytes]) -> PieceBytes:
    columns = list(zip(*parts, strict=True))
    return PieceBytes(*map(sum, columns)) if columns else NOTHING


@functools.lru_cache(maxsize=4096)
def stored_pieces(
    model: ModelConfig,
    precision: PrecisionConfig,
    optimizer: OptimizerConfig,
    tensor: int,
    fsdp: int,
    expert: int = 1,
    freeze: tuple[str, ...] = (),
) -> Mapping[str, PieceBytes]:
    """Bytes by piece, for the rank with the largest part of each parameter; `tensor` to `expert` are degrees."""
    whole, formats = with_frozen(model_facts(model).account, freeze), precision.formats()
    names, alike = _parameters(model, freeze)
    wide = tuple(f"{piece}." for piece in matched(whole, formats.fp32_parts))
    float8 = precision.float8_gathered(whole)
    layout = Layout(shard=fsdp, tensor=tensor, expert=expert)
    account = account_for(whole, layout)
    kinds = {}
    for piece in set(alike.values()):
        parts = []
        for name in names[piece]:
            degrees = cuts_of(account, name, layout)._asdict()
            part = stored_part(account, name, **degrees)
            elements = math.prod(gathered_part(account, name, **degrees))
            compute, reduce = (4, 4) if name.startswith(wide) else (formats.compute_bytes, formats.reduce_bytes)
            stored = Stored(name=name, shape=whole.parameters[name], part=part, element_bytes=formats.master_bytes)
            gathered = elements * (1 if name in float8 else compute)
            if name in whole.frozen:
                parts.append(NOTHING._replace(parameters=stored.part_bytes, gathered=gathered))
                continue
            parts.append(
                PieceBytes(
                    parameters=stored.part_bytes,
                    optimizer=optimizer.state_bytes(stored),
                    trained=stored.part_bytes,
                    gathered=gathered,
                    gradients=elements * compute,
                    unreduced=elements * reduce,
                    update_flops=optimizer.update_flops(stored),
                )
            )
        kinds[piece] = added(parts)
    return {piece: kinds[other] for piece, other in alike.items()}


@functools.lru_cache(maxsize=256)
def _parameters(model: ModelConfig, freeze: tuple[str, ...]) -> tuple[Mapping[str, Sequence[str]], Mapping[str, str]]:
    """For each piece, the names of its parameters; and for each piece, the first piece with equal parameters.

    Parameters are equal if names within the piece, shapes and frozen names are. A model that cannot be cut is one
    piece, named "".
    """
    account = with_frozen(model_facts(model).account, freeze)
    names: dict[str, list[str]] = {piece: [] for piece in account.pieces or ("",)}
    depths = sorted({piece.count(".") + 1 for piece in names})
    for name in account.parameters:
        steps = name.split(".")
        piece = next((".".join(steps[:n]) for n in depths if ".".join(steps[:n]) in names), "")
        names.setdefault(piece, []).append(name)
    first: dict[object, str] = {}
    alike = {}
    for piece, own in names.items():
        kind = tuple((name.removeprefix(f"{piece}."), account.parameters[name], name in account.frozen) for name in own)
        # Only blocks count as equal: pieces outside blocks may differ in more than their parameters.
        alike[piece] = first.setdefault(kind, piece) if is_in_block(piece) else piece
    return names, alike


def reserved_bytes(recipe: Recipe, machine: Machine, memory: RankMemory) -> int:
    """Bytes that a rank of a resolved recipe takes from its device, with the message buffers that its process keeps."""
    messages = exchanged_bytes(recipe, memory.rank) if machine.message_excess else 0.0
    return machine.reserved_bytes(memory.allocated) + round(machine.message_excess * messages)


def exchanged_bytes(recipe: Recipe, pipeline: int) -> float:
    """Bytes of the tensors that a rank sends or receives for one microbatch.

    A process keeps memory for these buffers in its heap, because it frees them in another order than it allocates.
    """
    if recipe.layout.world == 1:
        return 0.0
    rows = step_traffic(step_of(recipe), Coordinate(pipeline=pipeline))
    return sum(row.bytes for row in rows) / recipe.microbatches


# Gradients of activations that exist at one time in a block's backward, in units of the block's largest tensor. For
# example, a product of two tensors has the gradients of the result and of both factors.
_LARGEST_TOGETHER = 3


class BlockBytes(NamedTuple):
    """Bytes of a block's activations: those `saved` until its backward, and those computed `again` before it."""

    saved: int
    again: int


_IDLE = BlockBytes(0, 0)


@functools.lru_cache(maxsize=8192)
def block_bytes(
    ac: ACConfig, model: ModelConfig, share: Share, microbatch: int, seq_len: int, *, compiled: bool = False
) -> tuple[tuple[BlockBytes, ...], tuple[int, ...]]:
    """The bytes of each kind of block, and for each block the index of its kind."""
    block = (_compiled_operations if compiled else block_operations)(model, microbatch, seq_len)
    first, kind_of = treatments(ac, model_facts(model).account.layers)
    kinds = []
    for number in first:
        saved = ac.saved_bytes(block, share, number=number)
        # Recomputation brings back what autograd keeps without checkpointing.
        again = max(0, share.bytes_of(kept_activations(block)) - saved) if ac.recomputed(block, number=number) else 0
        kinds.append(BlockBytes(saved, again))
    return tuple(kinds), kind_of


@functools.lru_cache(maxsize=1024)
def _compiled_operations(model: ModelConfig, microbatch: int, seq_len: int) -> tuple[Operation, ...]:
    return tuple(as_compiled(block_operations(model, microbatch, seq_len)))


def as_compiled(block: Sequence[Operation]) -> list[Operation]:
    """A block's operations with only the tensors that compiled code keeps for the backward pass.

    The compiler knows that the backward pass does not need the result of the last product. It computes the results of
    pointwise operations again, inside kernels of the backward pass, if no product or attention needs such a result.
    """
    last = max(place for place, operation in enumerate(block) if operation.kind == "matmul")
    cheap = {
        result.name
        for operation in block
        if operation.kind == "pointwise"
        for operator in operation.operators
        for result in operator.results
    }
    whole = {kept.name for operation in block if operation.kind in ("matmul", "attention") for kept in operation.keeps}
    again, operations = cheap - whole, []
    for place, operation in enumerate(block):
        keeps = operation.keeps
        if operation.kind == "pointwise":
            keeps = tuple(kept for kept in keeps if kept.name not in again)
        operators = operation.operators
        if place == last:
            operators = tuple(replace(operator, results=()) for operator in operators)
        operations.append(replace(operation, keeps=keeps, operators=operators))
    return operations


@functools.lru_cache(maxsize=8192)
def saved_bytes(
    ac: ACConfig, model: ModelConfig, share: Share, microbatch: int, seq_len: int, *, compiled: bool = False
) -> int:
    """Bytes that all blocks keep between forward and backward."""
    kinds, kind_of = block_bytes(ac, model, share, microbatch, seq_len, compiled=compiled)
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
    """Bytes kept between the two halves of a split backward, by name of a piece outside blocks; "" names a block.

    The gradients of weights need the inputs of linear layers and the gradients of their outputs. Everything else is
    freed (`titanlab.parallelism.pipeline_weights`), so the bytes do not depend on checkpointing.
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
