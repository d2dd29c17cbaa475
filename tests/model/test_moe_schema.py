"""The fields of models with experts: what each may be, and which layouts can count by sequence."""

import math
from dataclasses import replace

import pytest

from tests import tiny
from tests.model.published import load
from titanlab.costs import Layout, RoutedExperts
from titanlab.errors import ConfigError
from titanlab.recipe.recipe_rules import setting
from titanlab.techniques.model.llama_schema import BALANCES

NAME = "mixtral_debug"


def test_an_account_has_the_experts():
    model = load(NAME, experts=6, active_experts=3, balance="auxiliary_batch", bias_rate=0.5, auxiliary_weight=0.25)
    assert model.routed == RoutedExperts(
        count=6, active=3, balance="auxiliary_batch", bias_rate=0.5, auxiliary_weight=0.25
    )
    assert model.account().experts == model.routed


@pytest.mark.parametrize(("count", "active"), [(2, 2), (8, 2), (8, 8)])
def test_numbers_of_experts(count, active):
    assert load(NAME, experts=count, active_experts=active).routed.active == active


@pytest.mark.parametrize(
    ("count", "active", "line"),
    [
        (1, 1, "model.experts=1: must be at least 2: one expert is a dense feed-forward; try 8, or a dense model"),
        (-3, 2, "model.experts=-3: must be at least 2"),
        (8, 0, "model.active_experts=0: must be at least 2"),
        (8, 9, "model.active_experts=9: is more than the 8 experts; try 8"),
    ],
)
def test_numbers_that_are_no_experts(count, active, line):
    with pytest.raises(ConfigError) as refused:
        load(NAME, experts=count, active_experts=active)
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("balance", "even", f"model.balance=even: no such balance; choose one of {', '.join(BALANCES)}"),
        ("bias_rate", -0.1, "model.bias_rate=-0.1: must be finite and at least 0; try 0.001"),
        ("bias_rate", math.nan, "model.bias_rate=nan: must be finite"),
        ("auxiliary_weight", math.inf, "model.auxiliary_weight=inf: must be finite"),
    ],
)
def test_a_field_that_breaks_a_rule(field, value, line):
    with pytest.raises(ConfigError) as refused:
        load(NAME, **{field: value})
    assert str(refused.value).startswith(line)
    assert getattr(load(NAME, **{field: 0.0 if field != "balance" else "none"}), field) in (0.0, "none")


@pytest.mark.parametrize(
    ("balance", "layout", "line"),
    [
        ("auxiliary_sequence", {"context": 2}, "counts by sequence, of which context=2 gives each process a part"),
        ("auxiliary_sequence", {"shard": 2, "tensor": 2, "expert": 2}, "each process routes a part of the tokens"),
        ("auxiliary_sequence", {"shard": 2, "expert": 2}, None),
        ("auxiliary_sequence", {"tensor": 2}, None),
        ("auxiliary_batch", {"context": 2}, None),
        ("bias", {"shard": 2, "tensor": 2, "expert": 2}, None),
    ],
)
def test_sequences_are_counted_where_a_process_has_whole_ones(balance, layout, line):
    model = load(NAME, balance=balance, vocab_size=256)
    made = replace(setting(tiny.recipe("runs", model=model)), layout=Layout(**layout))
    if line is None:
        model.check(made)
        return
    with pytest.raises(ConfigError) as refused:
        model.check(made)
    assert str(refused.value).startswith("model.balance=auxiliary_sequence: ")
    assert line in str(refused.value)
