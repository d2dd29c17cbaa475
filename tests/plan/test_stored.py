"""Bytes that a rank stores and gathers, by piece."""

from __future__ import annotations

from tests.plan.layouts import SMALL
from titanlab.plan.memory import added, representatives, stored_pieces
from titanlab.techniques.optimizer.optimizers_schema import AdamW
from titanlab.techniques.precision.cast_schema import Bf16, Fp32

ACCOUNT = SMALL.account()


def whole(precision, *, tensor=1, fsdp=1):
    return added(stored_pieces(SMALL, precision, AdamW(), tensor, fsdp).values())


def test_one_rank_stores_every_parameter_and_two_averages():
    count = ACCOUNT.parameter_count
    found = whole(Bf16())
    assert found.parameters == 4 * count
    assert found.optimizer == 8 * count + 4 * len(ACCOUNT.parameters)
    assert (found.gathered, found.gradients, found.unreduced) == (2 * count, 2 * count, 4 * count)


def test_in_one_precision_everything_has_its_width():
    count = ACCOUNT.parameter_count
    assert whole(Fp32())[2:] == (4 * count, 4 * count, 4 * count)


def test_blocks_are_alike_and_other_pieces_stand_for_themselves():
    like = representatives(SMALL)
    assert {like[f"layers.{number}"] for number in range(6)} == {"layers.0"}
    assert like["tok_embeddings"] == "tok_embeddings"
