"""The stages of a pipeline's ranks: sums over their own pieces, by hand, with uneven stages and two kinds of blocks."""

from __future__ import annotations

import pytest

from tests.plan.recipes import SMALL, made
from titanlab.plan.block_time import ModelTime, PieceTime, total
from titanlab.plan.pipeline_time import rank_stages
from titanlab.plan.stages import stages_of
from titanlab.techniques.schedule.published_schema import ZBV, Interleaved1F1B, OneFOneB

MODEL, SPLIT, SEQ = SMALL, made().parallelism.split, 1024
# Powers of ten, so that every sum says which pieces it has: the second kind of block is recomputed.
PLAIN = PieceTime(1.0, 2.0, 3.0, 0.0, 0.1, 0.2, 0.01, 0.02)
AGAIN = PLAIN._replace(recomputed=100.0)
EDGES = {"tok_embeddings": PieceTime(1e3, 0, 0, 0), "norm": PieceTime(1e4, 0, 0, 0), "output": PieceTime(1e5, 0, 0, 0)}
KIND_OF = (1, 1, 0, 0, 0, 1)


def times(kind_of=KIND_OF):
    alone = ModelTime(kinds=(PLAIN, AGAIN), kind_of=kind_of, edges=EDGES, once=0.0, whole=PLAIN)
    return ModelTime(kinds=alone.kinds, kind_of=kind_of, edges=EDGES, once=0.0, whole=total(alone, kind_of, EDGES))


def blocks_and_edges(pieces):
    blocks = [int(piece.split(".")[1]) for piece in pieces if piece.startswith("layers.")]
    return blocks, [piece for piece in pieces if not piece.startswith("layers.")]


def test_without_a_pipeline_the_only_rank_has_everything():
    found = rank_stages(times(), MODEL, OneFOneB(), SPLIT, 1, SEQ)
    rank = found.busiest
    assert found.pipeline is None
    assert (rank.blocks, rank.edges) == (6, tuple(EDGES))
    assert rank.compute == pytest.approx(6 * 6.0 + 3 * 100.0 + 111e3)
    assert (rank.tensor, rank.context) == (pytest.approx(6 * 0.3), pytest.approx(6 * 0.03))
    # The gradients of weights are a part of their own; recomputation and communication are in the other half.
    assert rank.time == pytest.approx((6 * 1.11 + 111e3, 6 * 2.22 + 300.0, 18.0))
    assert (rank.block_forward, rank.block_backward) == (pytest.approx(6 * 1.11), pytest.approx(6 * 5.22 + 300.0))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved1F1B(), ZBV()], ids=lambda schedule: schedule.kind)
def test_the_busiest_rank_is_the_one_with_the_most_seconds(schedule, ranks):
    """The seconds of each rank, from the names of its pieces and the kinds of its blocks."""
    stages, placement = stages_of(MODEL, schedule, SPLIT, ranks, SEQ), schedule.placement(ranks=ranks)
    seconds, pieces = [0.0] * ranks, [[] for _ in range(ranks)]
    for names, rank in zip(stages, placement, strict=True):
        blocks, edges = blocks_and_edges(names)
        seconds[rank] += sum(6.33 + 100 * KIND_OF[number] for number in blocks)
        seconds[rank] += sum(EDGES[name].forward for name in edges)
        pieces[rank] += names
    most = max(range(ranks), key=seconds.__getitem__)
    found = rank_stages(times(), MODEL, schedule, SPLIT, ranks, SEQ)
    blocks, edges = blocks_and_edges(pieces[most])
    assert found.pipeline is not None
    assert found.pipeline.busiest == most
    assert (found.busiest.blocks, list(found.busiest.edges)) == (len(blocks), edges)
    assert sum(found.busiest.time) == pytest.approx(seconds[most])
    recomputed = 100.0 * sum(KIND_OF[number] for number in blocks)
    assert found.busiest.block_backward == pytest.approx(len(blocks) * 5.22 + recomputed)


def test_blocks_that_are_recomputed_are_counted_where_they_are():
    """Two stages: the same kinds in another order of blocks move the time from one rank to the other."""
    heavy_first, heavy_last = (1, 1, 0, 0, 0, 0), (0, 0, 0, 0, 1, 1)
    found = [
        rank_stages(times(kinds), MODEL, OneFOneB(), SPLIT, 2, SEQ).busiest.block_backward
        for kinds in (heavy_first, heavy_last)
    ]
    # The head makes the last rank the busiest one in both.
    assert found[1] - found[0] == pytest.approx(200.0)
