"""Parameters and shards of the estimates are those of the model and of FSDP2."""

from __future__ import annotations

import math

import pytest
import torch

from tests.planner.layouts import SMALL
from titanlab.costs.config_key import key_of
from titanlab.costs.shard_account import gathered_part, stored_part, tensor_part
from titanlab.optimizer.adamw_schema import AdamW
from titanlab.planner.stored import Sharding, added, representatives, stored_pieces
from titanlab.precision.bf16_schema import Bf16
from titanlab.precision.fp32_schema import Fp32

ACCOUNT = SMALL.account()


def whole(precision, *, tensor=1, fsdp=1):
    sharding = Sharding(key_of(SMALL), key_of(precision), key_of(AdamW()), tensor, fsdp)
    return added(stored_pieces(sharding).values())


def test_one_rank_stores_every_parameter_and_two_averages():
    count = ACCOUNT.parameter_count
    found = whole(Bf16())
    assert found.parameters == 4 * count
    assert found.optimizer == 8 * count + 4 * len(ACCOUNT.parameters)
    assert (found.gathered, found.gradients, found.unreduced) == (2 * count, 2 * count, 4 * count)


def test_in_one_precision_everything_has_its_width():
    count = ACCOUNT.parameter_count
    assert whole(Fp32())[2:] == (4 * count, 4 * count, 4 * count)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_parts_of_tensor_parallelism_make_the_whole(tensor):
    for name, shape in ACCOUNT.parameters.items():
        parts = [tensor_part(ACCOUNT, name, tensor=tensor, number=rank) for rank in range(tensor)]
        cut = [dim for dim in range(len(shape)) if parts[0][dim] != shape[dim]]
        if not cut:
            assert parts == [shape] * tensor
        else:
            assert sum(part[cut[0]] for part in parts) == shape[cut[0]]


@pytest.mark.parametrize("fsdp", [1, 2, 3, 7])
def test_shards_are_torchs_first_chunk(fsdp):
    for name, shape in ACCOUNT.parameters.items():
        first = torch.chunk(torch.empty(shape, device="meta"), fsdp)[0]
        assert stored_part(ACCOUNT, name, tensor=1, fsdp=fsdp) == tuple(first.shape)
        gathered = gathered_part(ACCOUNT, name, tensor=1, fsdp=fsdp)
        assert math.prod(gathered) == fsdp * first.numel()


def test_uneven_rows_are_cut_by_columns():
    # Of 768 rows, four ranks of tensor parallelism have 192 each, which 128 shards cannot divide, but 256 columns.
    name = "layers.0.feed_forward.w1.weight"
    assert stored_part(ACCOUNT, name, tensor=4, fsdp=128) == (768 // 4, 256 // 128)


def test_blocks_are_alike_and_other_pieces_stand_for_themselves():
    like = representatives(key_of(SMALL))
    assert {like[f"layers.{number}"] for number in range(6)} == {"layers.0"}
    assert like["tok_embeddings"] == "tok_embeddings"
