"""What one rank keeps of the activations of a microbatch, and how many microbatches it keeps at the same time."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from titanlab.costs import Activation, Operation, Share, chunk_bytes, kept_activations
from titanlab.plan.pipeline_time import shorter
from titanlab.plan.stages import actions_of, block_operations, edge_operations, model_facts, placement_of, treatments
from titanlab.techniques.ac.contract import ACConfig
from titanlab.techniques.model.contract import ModelConfig
from titanlab.techniques.schedule.action import Action, Kind
from titanlab.techniques.schedule.contract import PipelineSchedule

# Bytes for each logit while the loss is computed, beside the logits' own width c. Eager: in the forward pass logits,
# their copy in float32 and log-probabilities; in the backward pass log-probabilities, their gradient, and that of the
# copy. A compiled loss keeps the logits and writes their gradient. Logits that are split over the vocabulary
# (`titanlab.parallelism.loss.SplitLoss`): log-probabilities, their gradient, and its copy in the logits' precision.
_FLOAT = 4
# Gradients of a block's activations that exist together, in units of its largest tensor: of a product of two tensors,
# its own gradient and those of both.
_LARGEST_TOGETHER = 3


class BlockBytes(NamedTuple):
    """Bytes of a block: kept between forward and backward, and recomputed before its backward begins."""

    saved: int
    again: int


@functools.lru_cache(maxsize=8192)
def block_bytes(
    ac: ACConfig, model: ModelConfig, share: Share, microbatch: int, seq_len: int
) -> tuple[tuple[BlockBytes, ...], tuple[int, ...]]:
    """The different blocks, and the number in them of each block."""
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
    """Bytes of gradients of activations that exist together in the backward pass of a block."""
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

    The gradients of weights need the inputs of linear layers, and the gradients of their outputs; all else is freed
    (`titanlab.parallelism.pipeline_weights`). So it does not depend on checkpointing.
    """
    return {name: share.bytes_of(factors) for name, factors in _factors(model, microbatch, seq_len).items()}


@functools.lru_cache(maxsize=1024)
def _factors(model: ModelConfig, microbatch: int, seq_len: int) -> Mapping[str, Sequence[Activation]]:
    """The factors of the products that are the gradients of weights, by name of an edge; a block has an empty name."""
    of_edges = {edge.name: tuple(_factors_of([edge])) for edge in edge_operations(model, microbatch, seq_len)}
    return {"": tuple(_factors_of(block_operations(model, microbatch, seq_len))), **of_edges}


def _factors_of(operations: Iterable[Operation]) -> Iterator[Activation]:
    for operation in operations:
        if operation.kind == "matmul":
            yield from operation.keeps
            for result in (result for operator in operation.operators for result in operator.results):
                yield replace(result, name=f"{result.name}.gradient")


def loss_bytes(
    model: ModelConfig,
    share: Share,
    microbatch: int,
    seq_len: int,
    *,
    last: str,
    loss_parallel: bool,
    compiled: bool,
    chunk: int = 0,
) -> int:
    """Largest sum of bytes of logits, log-probabilities and their gradients in one microbatch.

    Args:
        chunk: tokens for which they are computed at once; 0: all.
    """
    edges = {edge.name: edge for edge in edge_operations(model, microbatch, seq_len)}
    if last not in edges:
        return 0
    output = edges[last].output
    splits = share.tensor if loss_parallel else 1
    logits = math.prod(output[:-1]) // share.context * -(-output[-1] // splits)
    width = share.element_bytes
    if chunk:
        return chunk_bytes(
            tokens=math.prod(output[:-1]) // share.context,
            chunk=chunk,
            columns=-(-output[-1] // share.tensor),
            dim=model_facts(model).account.dim,
            width=width,
            accelerator=share.accelerator,
            compiled=compiled,
        )
    copy = _FLOAT if width != _FLOAT else 0
    if splits > 1:
        forward = width + (0 if compiled else copy) + _FLOAT
        return logits * max(forward, 2 * _FLOAT + (width if copy else 0))
    if compiled:
        return logits * 2 * width
    return logits * max(width + copy + _FLOAT, 3 * _FLOAT)


# For each moment of a rank with most microbatches, the number of each of its stages between their forward and the
# gradient of their input; then of each between the two halves of a split backward.
Moments = tuple[tuple[int, ...], ...]
# The same two numbers of each moment, added up over the rank's stages.
Totals = tuple[tuple[int, int], ...]
T = TypeVar("T")
# Each moment is compared with so many of the largest ones. More would find more that are covered, and take longer than
# they save.
_COMPARED = 4


@functools.lru_cache(maxsize=4096)
def peaks(schedule: PipelineSchedule, *, ranks: int, microbatches: int, rank: int) -> Moments:
    """The moments of a rank in which its memory may be largest: no much larger one has as many of every stage.

    The order of numbers is that of the rank's stages.
    """
    return _steady(lambda count: _peaks(schedule, ranks, count, rank), ranks, microbatches)


@functools.lru_cache(maxsize=4096)
def totals(schedule: PipelineSchedule, *, ranks: int, microbatches: int, rank: int) -> Totals:
    """The same of a rank whose stages are alike: the sums of each moment's two kinds of numbers."""
    moments = peaks(schedule, ranks=ranks, microbatches=microbatches, rank=rank)
    half = len(moments[0]) // 2
    largest: list[tuple[int, int]] = []
    for pair in sorted({(sum(moment[:half]), sum(moment[half:])) for moment in moments}, reverse=True):
        if not largest or pair[1] > largest[-1][1]:
            largest.append(pair)
    return tuple(largest)


def _steady(value_of: Callable[[int], T], ranks: int, microbatches: int) -> T:
    """The value for some microbatches. If more of them change nothing, others do not either, and are not listed."""
    few = shorter(ranks, microbatches)
    if few < microbatches:
        of_few = value_of(few)
        if of_few == value_of(min(microbatches, few + ranks)):
            return of_few
    return value_of(microbatches)


@functools.lru_cache(maxsize=4096)
def _peaks(schedule: PipelineSchedule, ranks: int, microbatches: int, rank: int) -> Moments:
    stages = [stage for stage, owner in enumerate(placement_of(schedule, ranks)) if owner == rank]
    return _of_rank(actions_of(schedule, ranks, microbatches)[rank], stages)


def _of_rank(order: Sequence[Action], stages: Sequence[int]) -> Moments:
    place = {stage: number for number, stage in enumerate(stages)}
    alive, maxima, rose = [0] * 2 * len(stages), set(), False
    for stage, kind, _ in order:
        number = place[stage]
        if kind is Kind.FORWARD:
            alive[number] += 1
            rose = True
            continue
        # Only before a number falls can it have been largest.
        if rose:
            maxima.add(tuple(alive))
        alive[number + len(stages) if kind is Kind.WEIGHT else number] -= 1
        rose = kind is Kind.INPUT
        if rose:
            alive[number + len(stages)] += 1
    maxima.add(tuple(alive))
    largest: list[tuple[int, ...]] = []
    # A moment that another one covers has a smaller sum.
    for moment in sorted(maxima, key=sum, reverse=True):
        if not any(all(map(operator.ge, other, moment)) for other in largest[:_COMPARED]):
            largest.append(moment)
    return tuple(sorted(largest))
