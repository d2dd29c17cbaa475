"""The linear layers of a model, by its declared parameters."""

import dataclasses

import pytest

from titanlab.costs import linear_layers, part_shape, path_matches
from titanlab.techniques.model.llama_schema import Llama

MODEL = Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=200, vocab_size=256).account()


def test_layers_that_multiply_are_found_with_and_without_a_tensor_plan():
    layers = linear_layers(MODEL)
    assert len(layers) == 2 * 7 + 1
    assert layers["layers.0.attention.wk"] == (32, 64)
    assert not {MODEL.embedding.removesuffix(".weight"), "norm"} & set(layers)
    assert linear_layers(dataclasses.replace(MODEL, tensor_plan={})) == layers


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("wk", True),
        ("attention.w*", True),
        ("layers.0", True),
        ("layers.0.attention.wk", True),
        ("k", False),
        ("layers.1", False),
        ("attention.wq", False),
    ],
)
def test_a_pattern_matches_steps_of_a_path(pattern, is_match):
    assert path_matches("layers.0.attention.wk", pattern) is is_match


def test_a_part_has_its_share_of_the_dim_that_is_cut():
    assert part_shape(MODEL, "layers.0.attention.wk", (32, 64), 2) == (16, 64)
    assert part_shape(MODEL, "layers.0.attention.wo", (64, 64), 2) == (64, 32)
    # Parts are uneven: the first is the largest.
    assert part_shape(MODEL, "layers.0.feed_forward.w1", (200, 64), 3) == (67, 64)
