"""The communication of context parallelism in one block, by its method."""

from __future__ import annotations

from titanlab.costs.step import Coordinate, Step
from titanlab.costs.traffic_table import Traffic


def context_of_block(step: Step, block: str, rank: Coordinate, traffic: Traffic) -> None:
    """Keys and values in forward and backward, and their gradients, of all microbatches."""
    forward_context_of_block(step, block, rank, traffic)
    # The backward pass needs keys and values once more.
    forward_context_of_block(step, block, rank, traffic)
    ranks, axis, times = step.layout.context, step.axis("context"), step.microbatches
    whole, half = _block_bytes(step, block)
    after, before = ranks - 1 - rank.context, rank.context
    if step.context_method == "all_gather":
        returned = 2 * (after * whole + before * half)
        traffic.add(axis, "all_to_all", returned, ranks=ranks, times=times, own=0)
        return
    # Gradients of the received blocks go to their owners, and those of this rank's keys arrive.
    _add(traffic, axis, "send", {whole: after, half: before}, ranks=ranks, times=2 * times)
    _add(traffic, axis, "recv", {whole: before, half: after}, ranks=ranks, times=2 * times)


def forward_context_of_block(step: Step, block: str, rank: Coordinate, traffic: Traffic) -> None:
    """Keys and values of one forward pass, of all microbatches."""
    ranks, axis, times = step.layout.context, step.axis("context"), step.microbatches
    whole, half = _block_bytes(step, block)
    if step.context_method == "all_gather":
        traffic.add(axis, "all_gather", 2 * ranks * whole, ranks=ranks, times=times)
        return
    after, before = ranks - 1 - rank.context, rank.context
    # A rank first sends its own block, then the blocks that arrive; of blocks of ranks before it, only the first half.
    sent = {half: ranks - 1} if before == 0 else {whole: min(after + 1, ranks - 1), half: before - 1}
    _add(traffic, axis, "send", sent, ranks=ranks, times=2 * times)
    _add(traffic, axis, "recv", {whole: after, half: before}, ranks=ranks, times=2 * times)


def _add(traffic: Traffic, axis: str, kind: str, counts: dict[int, int], *, ranks: int, times: int) -> None:
    """Count messages.

    Args:
        counts: of messages by their bytes.
    """
    for size, count in counts.items():
        traffic.add(axis, kind, size, ranks=ranks, times=times * count)


def _block_bytes(step: Step, block: str) -> tuple[int, int]:
    """Bytes of one rank's keys or values of a microbatch, and of the first half of its tokens."""
    account = step.account
    heads = account.kv_heads // step.layout.tensor
    whole = step.tokens * heads * account.head_dim * step.element_bytes(block)
    return whole, whole // 2
