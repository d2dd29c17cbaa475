"""Which products AsyncTP makes one operation with their collective, by a model's account."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titanlab.costs.account import TensorPlan
from titanlab.costs.fused_layers import FusedLayers, fused_layers
from titanlab.model.llama_schema import Llama
from titanlab.model.qwen3_moe_schema import Qwen3Moe
from titanlab.precision.float8_schema import Float8Rowwise

SIZES = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "vocab_size": 256}


@pytest.fixture
def account():
    return Llama(**SIZES, ffn_dim=192).account()


def changed(account, *, styles=None, parameters=None):
    """The account with other styles in its tensor plan, and more parameters."""
    return replace(
        account,
        tensor_plan=TensorPlan({**account.tensor_plan, **(styles or {})}),
        parameters={**account.parameters, **(parameters or {})},
    )


def callers(*names):
    return tuple(f"layers.{number}.{name}.projections" for name in names for number in (0, 1))


def test_which_products_are_fused(account):
    dense = fused_layers(account, ())
    assert dense.gathering == callers("attention", "feed_forward")
    assert {*dense.scattering} == {
        f"layers.{number}.{name}" for name in ("attention.wo", "feed_forward.w2") for number in (0, 1)
    }
    assert dense.total == 8
    assert fused_layers(Llama(**SIZES, ffn_dim=192, fused=True).account(), ()) == dense


def test_experts_route_what_their_block_has_gathered():
    experts = Qwen3Moe(**SIZES, head_dim=32, ffn_dim=64, experts=4, active_experts=2).account()
    found = fused_layers(experts, ())
    assert found.gathering == callers("attention")
    assert found.total == 4


def test_the_operator_adds_no_bias(account):
    biased = changed(account, parameters={"layers.1.attention.wk.bias": (32,)})
    assert fused_layers(biased, ()).gathering == tuple(
        name for name in callers("attention", "feed_forward") if name != "layers.1.attention.projections"
    )


def test_layers_of_another_format_are_not_fused_nor_what_is_joined_with_one(account):
    assert fused_layers(account, Float8Rowwise().products(account)).total == 0
    found = fused_layers(account, ["layers.0.attention.wk", "layers.1.feed_forward.w2"])
    assert found.gathering == callers("attention", "feed_forward")[1:]
    assert "layers.1.feed_forward.w2" not in found.scattering
    assert found.total == 6


def test_another_reader_of_what_a_module_gathers_needs_it_gathered(account):
    """The layers of one caller gather in their products, which another layer of the module does not see."""
    more = {f"layers.{number}.attention.gate.weight": (64, 64) for number in (0, 1)}
    gated = changed(account, styles={"layers.*.attention.gate": "colwise"}, parameters=more)
    assert fused_layers(gated, ()).gathering == callers("feed_forward")
    # Of a module whose name begins like this one's it is none.
    more = {f"layers.{number}.attention_gate.w.weight": (64, 64) for number in (0, 1)}
    beside = changed(account, styles={"layers.*.attention_gate.w": "colwise"}, parameters=more)
    assert fused_layers(beside, ()).gathering == callers("attention", "feed_forward")


def test_a_module_that_is_not_gathered_for_its_layers_is_not_fused(account):
    whole = changed(account, styles={"layers.*.attention": "whole"})
    assert fused_layers(whole, ()).gathering == callers("feed_forward")


def test_without_a_tensor_plan_nothing_is_fused(account):
    bare = replace(account, tensor_plan=TensorPlan({}))
    assert fused_layers(bare, ()) == FusedLayers((), ())
