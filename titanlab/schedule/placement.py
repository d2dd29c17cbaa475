"""Which rank of a pipeline has which stage."""

from __future__ import annotations

from collections.abc import Sequence


def looped(*, ranks: int, stages_per_rank: int = 1) -> list[int]:
    """Rank of each stage, round and round: 0 1 2 0 1 2."""
    return [stage % ranks for stage in range(ranks * stages_per_rank)]


def v_shaped(*, ranks: int) -> list[int]:
    """Rank of each stage, there and back: 0 1 2 2 1 0. First and last stage are on the same rank."""
    return [*range(ranks), *reversed(range(ranks))]


def stages_of(placement: Sequence[int], rank: int) -> list[int]:
    """The stages of a rank, in the order of the forward pass."""
    return [stage for stage, owner in enumerate(placement) if owner == rank]
