"""Pieces of a model by stage: balanced, by numbers of blocks, by names; and splits that do not fit."""

import dataclasses

import pytest

from titanlab.recipe import stage_pieces
from titanlab.techniques.model.llama_schema import Llama

MODEL = Llama(dim=64, layers=4, heads=4, kv_heads=2, ffn_dim=192, vocab_size=256)
PIECES = ("tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "output")


def pieces_of(split, stages=2, *, model=MODEL):
    sizes = {"batch": 1, "seq_len": 32}
    return stage_pieces(
        model.account(),
        split=split,
        placement=range(stages),
        block=model.block_operations(**sizes),
        edges=model.edge_operations(**sizes),
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_balanced_split_has_each_piece_once_in_order(stages):
    found = pieces_of(None, stages)
    assert len(found) == stages
    assert tuple(piece for stage in found for piece in stage) == PIECES
    assert all(found)


def test_a_balanced_split_makes_the_dearest_stage_cheap():
    # The output of a large vocabulary takes longer than all blocks: it has a stage to itself.
    large = dataclasses.replace(MODEL, vocab_size=256_000)
    assert pieces_of(None, 2, model=large)[1] == ("output",)
    first, second = pieces_of(None, 2)
    assert {"layers.0", "layers.1"} <= {*first}
    assert {"layers.3", "output"} <= {*second}


@pytest.mark.parametrize(
    ("split", "found"),
    [
        ([4], [PIECES]),
        ([1, 3], [PIECES[:2], PIECES[2:]]),
        ([2, 2], [PIECES[:3], PIECES[3:]]),
        # The first and the last stage may have no block: they have pieces of their own.
        ([0, 4], [PIECES[:1], PIECES[1:]]),
        ([4, 0], [PIECES[:5], PIECES[5:]]),
        ([0, 4, 0], [PIECES[:1], PIECES[1:5], PIECES[5:]]),
        ([1, 2, 1], [PIECES[:2], PIECES[2:4], PIECES[4:]]),
        (["layers.2"], [PIECES[:3], PIECES[3:]]),
        (["layers.0", "output"], [PIECES[:1], PIECES[1:6], PIECES[6:]]),
        (["layers.1", "norm"], [PIECES[:2], PIECES[2:5], PIECES[5:]]),
    ],
)
def test_a_split_that_is_given_is_taken(split, found):
    stages = len(split) + (isinstance(split[0], str))
    assert pieces_of(split, stages) == found
