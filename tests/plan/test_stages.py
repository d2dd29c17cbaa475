"""The pieces of a model in each stage: all of them, once, in order."""

from __future__ import annotations

import pytest

from tests.plan.recipes import SMALL, made
from titanlab.errors import ConfigError
from titanlab.plan.stages import model_facts, parts_of, placement_of, stages_of, treatments
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, SelectiveLayer
from titanlab.techniques.schedule.published_schema import Interleaved1F1B

MODEL, SPLIT = SMALL, made().parallelism.split


@pytest.mark.parametrize(
    ("ranks", "schedule"), [(1, None), (2, None), (4, None), (2, Interleaved1F1B(stages_per_rank=2))]
)
def test_stages_have_all_pieces_in_order(ranks, schedule):
    recipe = made(model=SMALL, schedule=schedule)
    stages = stages_of(MODEL, recipe.schedule, SPLIT, ranks, 1024)
    assert [piece for stage in stages for piece in stage] == list(model_facts(MODEL).account.pieces)
    assert len(stages) == len(placement_of(recipe.schedule, ranks))
    blocks = [number for stage in stages for number in parts_of(stage).blocks]
    assert blocks == list(range(SMALL.layers))


def test_pieces_that_are_no_blocks_are_edges():
    facts = model_facts(MODEL)
    parts = parts_of((*facts.before, facts.block, *facts.after))
    assert parts.blocks == (SMALL.layers // 2,)
    assert parts.edges == (*facts.before, *facts.after)
    assert parts_of(()) == ((), ())


def test_more_stages_than_pieces_are_refused_in_one_line():
    with pytest.raises(ConfigError) as caught:
        stages_of(MODEL, made().schedule, SPLIT, 16, 1024)
    assert "\n" not in str(caught.value)


def test_the_sample_is_the_edges_and_one_block():
    facts = model_facts(MODEL)
    blocks = {name for name in facts.account.parameters if name.startswith("layers.")}
    edges = set(facts.account.parameters) - blocks
    own = {name for name in blocks if name.startswith(f"{facts.block}.")}
    assert set(facts.sample.parameters) == edges | own
    assert len(blocks) == SMALL.layers * len(own)


def test_treatments_name_the_first_block_of_each():
    assert treatments(FullCheckpointing(), 3) == ((0,), (0, 0, 0))
    first, kind_of = treatments(SelectiveLayer(every=3), 6)
    assert (len(first), [kind_of[number] for number in first]) == (2, [0, 1])
    assert sorted(kind_of).count(kind_of[first[0]]) in (2, 4)
