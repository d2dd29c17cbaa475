"""FLOPs of training from accounts, by the usual convention for model FLOPs utilisation."""

from __future__ import annotations

from collections.abc import Iterable

from titanlab.costs.account import ModelAccount, Operation


def per_token(account: ModelAccount, *, seq_len: int) -> int:
    """FLOPs of forward and backward for one token: 6·(N − N_emb) + 12·L·H·Q·T; of experts N counts the active ones.

    Every weight that multiplies costs 2 FLOPs forward and 4 backward; attention costs 12·H·Q·T per
    layer for H heads of width Q over T positions, without a discount for causality and without
    recomputation (PaLM, arXiv 2204.02311, appendix B). N_emb counts the tables of tokens and learned
    positions, which are looked up, not multiplied; a table that is tied to the head multiplies, so it
    is not subtracted. Norm weights and biases count in N, as usual, although they need no matmul.
    """
    weights = 6 * (account.active_count - account.embedding_count)
    attention = 12 * account.layers * account.heads * account.head_dim * seq_len
    return weights + attention


def forward(operations: Iterable[Operation]) -> int:
    """FLOPs of a forward pass through the given operations, for their batch and sequence."""
    return sum(operation.flops for operation in operations)
