"""Facts of a model: models that cannot be cut, tied tables, one block; and operations in the sizes that are asked for."""

from __future__ import annotations

import dataclasses

import pytest

from tests.plan.recipes import SMALL
from titanlab.costs import ModelAccount
from titanlab.plan.stages import block_operations, edge_operations, flops_per_token, model_facts


@dataclasses.dataclass(frozen=True)
class Whole:
    """A model that no pipeline can cut."""

    layers: int

    def account(self):
        blocks = {f"layers.{number}.w.weight": (4, 4) for number in range(self.layers)}
        return ModelAccount(
            parameters={"table.weight": (7, 4), **blocks}, embedding="table.weight", tied={}, layers=self.layers,
            heads=1, kv_heads=1, head_dim=4, dim=4, vocab_size=7,
        )  # fmt: skip


@pytest.mark.parametrize(("layers", "middle"), [(1, 0), (2, 1), (3, 1), (21, 10)])
def test_a_model_that_cannot_be_cut_is_one_piece_without_a_name(layers, middle):
    facts = model_facts(Whole(layers))
    assert (facts.before, facts.after) == ((), ("",))
    assert list(facts.sample.parameters) == ["table.weight", f"layers.{middle}.w.weight"]
    assert facts.sample.layers == 1


@pytest.mark.parametrize("tied", [False, True])
def test_one_block_stands_for_itself(tied):
    model = dataclasses.replace(SMALL, layers=1, tied_embeddings=tied)
    facts = model_facts(model)
    assert facts.block == "layers.0"
    assert facts.sample.parameters == facts.account.parameters
    assert facts.sample.parameter_count == facts.account.parameter_count
    assert facts.sample.pieces == facts.account.pieces
    assert dict(facts.sample.tied) == dict(facts.account.tied)


def test_flops_and_operations_are_those_of_the_sizes_that_are_asked_for():
    """A token's attention grows with the sequence: 12 FLOPs for each layer, head and position."""
    key = SMALL
    assert flops_per_token(key, 96) - flops_per_token(key, 32) == 12 * 6 * 256 * 64
    for operations in (block_operations, edge_operations):
        assert {each.output[0] for each in operations(key, 3, 32)} == {3}
        one, three = (sum(each.flops for each in operations(key, microbatch, 32)) for microbatch in (1, 3))
        assert three == 3 * one > 0
