"""Biases of routers: whose they are, how far they differ, and what an export without them says."""

from __future__ import annotations

import pytest

from titanlab.errors import ConfigError
from titanlab.techniques.model.llama_schema import Llama, Mixtral
from titanlab.train import left_out
from titanlab.train.weights_folder import biases_of, widest

SIZES = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 24, "vocab_size": 32}
BIASED = Mixtral(**SIZES, experts=4, active_experts=2, balance="bias")
GIVEN = {"layers.0": [0.0, 0.1, -0.2, 0.0], "layers.1": [0.0] * 4}


def test_the_biases_of_the_model_s_blocks_are_taken():
    assert biases_of(BIASED, GIVEN, "k", "v") == GIVEN


def test_no_state_is_no_biases():
    assert biases_of(BIASED, {}, "k", "v") == {}


@pytest.mark.parametrize(
    "model", [Llama(**SIZES), Mixtral(**SIZES, experts=4, active_experts=2, balance="auxiliary_batch")]
)
def test_a_model_whose_routers_have_none_takes_none(model):
    """The state of another balance has other numbers under the same names."""
    assert biases_of(model, {"layers.0": [1.0]}, "k", "v") == {}


@pytest.mark.parametrize(
    "routing",
    [
        {"layers.0": [0.0] * 4},
        {**GIVEN, "layers.2": [0.0] * 4},
        {**GIVEN, "layers.1": [0.0] * 3},
        {**GIVEN, "layers.1": [0.0] * 5},
        {**GIVEN, "layers.1": []},
        {"layers.1": [0.0] * 4, "layers.00": [0.0] * 4},
    ],
)
def test_biases_of_another_model_are_one_line(routing):
    with pytest.raises(ConfigError) as caught:
        biases_of(BIASED, routing, "k", "folder")
    rule = "its biases are not those of 2 blocks of 4 experts"
    assert str(caught.value) == f"k=folder: {rule}; choose the model that it was trained as"


def test_the_widest_difference_is_that_of_one_block():
    # Biases of two blocks are never compared.
    assert widest({"layers.0": [5.0, 5.5], "layers.1": [-3.0, -2.25]}) == 0.75
    assert widest({"layers.0": [1.0, 1.0]}) == 0.0
    assert widest({}) == 0.0


def test_an_export_says_which_biases_it_leaves_out():
    line = left_out(GIVEN)
    assert line.startswith("left out: the biases of 2 routers")
    assert "less than 0.3 (" in line
    assert "\n" not in line


@pytest.mark.parametrize("biases", [{}, {"layers.0": [0.0, 0.0]}, {"layers.0": [2.0, 2.0]}])
def test_biases_that_change_no_choice_are_not_mentioned(biases):
    assert left_out(biases) == ""
