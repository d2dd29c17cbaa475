"""Seconds of blocks and pieces: sums, hidden communication, and caches that never answer for another recipe."""

from __future__ import annotations

import dataclasses

import pytest

from tests.plan.recipes import SMALL, made
from titanlab.plan import block_time, machine_of
from titanlab.plan.block_time import PieceTime, exposed, model_time, total
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing, SelectiveLayer

KINDS = (PieceTime(1.0, 2.0, 3.0, 0.5, 0.1, 0.2, 0.3, 0.4), PieceTime(10.0, 20.0, 30.0, 0.0))


# A machine is equal only to itself: with one for all recipes the caches are shared, as in a search.
MACHINE = machine_of(made())


def times_of(recipe):
    return model_time(recipe, MACHINE)


def fresh(recipe):
    """The same without what other recipes have left in the caches."""
    for cache in (block_time._shaped, block_time._model_time):
        cache.cache_clear()
    return times_of(recipe)


def plain(times):
    return times.kinds, times.kind_of, dict(times.edges), times.once, times.whole


def test_a_piece_is_the_sum_of_its_passes():
    piece = KINDS[0]
    assert piece.ahead == pytest.approx(1.0 + 0.1 + 0.3)
    assert piece.back == pytest.approx(2.0 + 3.0 + 0.5 + 0.2 + 0.4)
    assert piece.compute == pytest.approx(6.5)


def test_sums_over_blocks_and_pieces():
    times = block_time.ModelTime(kinds=KINDS, kind_of=(0, 1, 0), edges={"head": KINDS[1]}, once=0.0, whole=KINDS[0])
    assert total(times, (0, 1, 0), ["head"]).forward == pytest.approx(1.0 + 10.0 + 1.0 + 10.0)
    # A stage may have no block, or no other piece; a name that has no time is none.
    assert total(times, (), ["head", "rope"]) == KINDS[1]
    assert total(times, (), ()) == PieceTime(0.0, 0.0, 0.0, 0.0)


def test_what_runs_beside_a_computation_is_never_free_and_never_more_than_one_after_the_other():
    for compute, exchange in ((1.0, 0.5), (0.5, 1.0), (1.0, 1.0)):
        assert 0 < exposed(compute, exchange, MACHINE) <= exchange
    assert exposed(1.0, 0.0, MACHINE) == 0.0
    assert exposed(0.0, 1.0, MACHINE) == 1.0


def test_blocks_that_are_recomputed_differ_from_others():
    times = {ac.kind: times_of(made(model=SMALL, ac=ac)) for ac in (NoCheckpointing(), FullCheckpointing())}
    assert [kind.recomputed > 0 for kind in times["full"].kinds] == [True]
    assert times["none"].kinds[0].recomputed == 0
    halves = times_of(made(model=SMALL, ac=SelectiveLayer(every=2)))
    assert len(halves.kinds) == 2
    assert sorted(halves.kind_of) == [0, 0, 0, 1, 1, 1]
    mean = (times["none"].whole.recomputed + times["full"].whole.recomputed) / 2
    assert halves.whole.recomputed == pytest.approx(mean)


def test_a_loss_in_chunks_has_all_its_time_ahead():
    recipe = made(model=SMALL)
    chunked = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, loss_chunk=256))
    whole, chunks = (list(times_of(each).edges.values())[-1] for each in (recipe, chunked))
    assert (chunks.inputs, chunks.weights) == (0.0, 0.0)
    assert chunks.compute == pytest.approx(whole.compute)


DEGREES = (
    {},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": False},
    {"tensor": 2, "sequence_parallel": True},
    {"tensor": 2, "async_tensor": True},
    {"tensor": 2, "loss_parallel": False},
    {"context": 2},
    {"context": 2, "context_method": "all_gather"},
    {"shard": 4, "tensor": 2},
)


def test_a_cache_never_answers_for_another_recipe():
    recipes = [
        made(model=SMALL, batch=8, seq_len=1024, ac=ac, compiled=compiled, microbatch=microbatch, **degrees)
        for degrees in DEGREES
        for ac in (NoCheckpointing(), FullCheckpointing())
        for compiled in (False, True)
        for microbatch in (None, 2)
    ]
    cached = [plain(times_of(recipe)) for recipe in recipes]
    assert cached == [plain(fresh(recipe)) for recipe in recipes]
    assert len(set(map(str, cached))) > len(DEGREES) * 4
