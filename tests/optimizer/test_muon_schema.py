"""Muon's fields, which parameters it updates, and the models that it refuses."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.model.published import load
from titanlab.errors import ConfigError
from titanlab.techniques.optimizer.contract import Stored
from titanlab.techniques.optimizer.optimizers_schema import Muon


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"momentum": 1.0}, "optimizer.momentum"),
        ({"momentum": -0.1}, "optimizer.momentum"),
        ({"momentum": float("nan")}, "optimizer.momentum"),
        ({"newton_schulz_steps": 0}, "optimizer.newton_schulz_steps"),
        # torch raises an error at 100 steps, in the first step.
        ({"newton_schulz_steps": 100}, "optimizer.newton_schulz_steps"),
        ({"adjust_lr": "half"}, "optimizer.adjust_lr"),
        ({"lr": 0.0}, "optimizer.lr"),
        ({"betas": [0.9]}, "optimizer.betas"),
    ],
)
def test_impossible_numbers_are_refused(change, key):
    with pytest.raises(ConfigError) as refused:
        Muon(**change)
    assert refused.value.key == key


def test_values_at_the_ends_of_their_ranges_are_taken():
    for steps in (1, 99):
        assert Muon(momentum=0.0, newton_schulz_steps=steps).newton_schulz_steps == steps


def test_it_updates_the_matrices_of_blocks():
    config = Muon()
    assert config.applies_to("layers.0.attention.wq.weight", 2)
    assert not config.applies_to("layers.0.attention_norm.weight", 1)
    assert not config.applies_to("output.weight", 2)


def test_a_rank_keeps_one_average_of_a_matrix_of_a_block_and_two_of_the_rest():
    sizes = {"shape": (64, 512), "part": (16, 512), "element_bytes": 2}
    # torch's Muon does not count its updates.
    assert Muon().state_bytes(Stored(name="layers.3.wq.weight", **sizes)) == 16 * 512 * 2
    assert Muon().state_bytes(Stored(name="output.weight", **sizes)) == 2 * 16 * 512 * 2 + 4


def test_experts_are_refused(tmp_path):
    """A stack of matrices has three dims: AdamW would update it without a word."""
    with pytest.raises(ConfigError, match="optimizer=muon: orthogonalises single matrices"):
        tiny.recipe(tmp_path, model=load("qwen3_moe_debug", vocab_size=256), optimizer=Muon())
    assert tiny.recipe(tmp_path, optimizer=Muon()).optimizer.kind == "muon"
