"""Fields of optimizers with Adam's averages, and where stochastic rounding is possible."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import pytest

from tests import tiny
from titanlab.errors import ConfigError
from titanlab.recipe.recipe_rules import setting
from titanlab.techniques.optimizer.optimizers_schema import AdamW, needs_torchao


@pytest.fixture
def in_bf16():
    """A setting whose parameters are stored in bfloat16."""
    return replace(setting(tiny.recipe("runs")), rests_in="bfloat16")


@pytest.fixture
def without_torchao(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"lr": 0.0}, "optimizer.lr"),
        ({"betas": [0.9]}, "optimizer.betas"),
        ({"betas": [0.9, 0.95, 0.99]}, "optimizer.betas"),
        ({"betas": [0.9, 1.0]}, "optimizer.betas"),
        ({"betas": [-0.1, 0.9]}, "optimizer.betas"),
        ({"betas": [0.9, math.nan]}, "optimizer.betas"),
        ({"eps": 0.0}, "optimizer.eps"),
        ({"eps": math.inf}, "optimizer.eps"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay"),
        ({"weight_decay": math.inf}, "optimizer.weight_decay"),
        ({"weight_decay": math.nan}, "optimizer.weight_decay"),
        ({"rounding": "up"}, "optimizer.rounding"),
    ],
)
def test_impossible_values_are_refused(change, key):
    with pytest.raises(ConfigError) as refused:
        AdamW(**change)
    assert refused.value.key == key


def test_values_at_the_ends_of_their_ranges_are_taken():
    config = AdamW(betas=[0.0, 0.0], weight_decay=0.0, rounding="nearest")
    assert (config.betas, config.weight_decay, config.rounding) == ((0.0, 0.0), 0.0, "nearest")


def test_a_small_model_has_a_larger_eps_and_the_other_fields():
    config = AdamW(lr=0.5, eps=1e-8, rounding="nearest")
    assert config.reduced(least_eps=1e-4) == AdamW(lr=0.5, eps=1e-4, rounding="nearest")
    assert AdamW(eps=1e-3).reduced(least_eps=1e-4).eps == 1e-3


def test_only_parameters_in_bfloat16_are_rounded_stochastically(in_bf16):
    AdamW(rounding="stochastic").check(in_bf16)
    for dtype in ("float32", "float16"):
        for rounding in ("auto", "nearest"):
            AdamW(rounding=rounding).check(replace(in_bf16, rests_in=dtype))
        with pytest.raises(
            ConfigError, match=r"^optimizer\.rounding=stochastic: .*; try auto, or precision=bf16_full$"
        ):
            AdamW(rounding="stochastic").check(replace(in_bf16, rests_in=dtype))


@pytest.mark.parametrize("rounding", ["auto", "stochastic"])
def test_stochastic_rounding_needs_torchao(in_bf16, without_torchao, rounding):
    """Also where `auto` chooses it: otherwise every rank would end with an ImportError."""
    with pytest.raises(
        ConfigError, match=rf"^optimizer\.rounding={rounding}: needs the package torchao, .*try nearest"
    ):
        AdamW(rounding=rounding).check(in_bf16)
    AdamW(rounding="nearest").check(in_bf16)
    AdamW().check(replace(in_bf16, rests_in="float32"))


def test_a_missing_torchao_has_two_cures(without_torchao):
    with pytest.raises(ConfigError) as refused:
        needs_torchao("optimizer.kind", "mine", cure="try adamw")
    rule = "optimizer.kind=mine: needs the package torchao, which is not installed"
    assert str(refused.value) == f"{rule}; try adamw, or install it"
