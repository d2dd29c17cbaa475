"""Parts and shards of parameters are those of tensor parallelism and of FSDP2."""

from __future__ import annotations

import math

import pytest
import torch

from tests.plan.recipes import SMALL
from titanlab.costs import Layout, account_for, cuts_of, fsdp_dim, gathered_part, stored_part, tensor_part
from titanlab.costs.account import Cuts
from titanlab.techniques.model.llama_schema import Mixtral

ACCOUNT = SMALL.account()
EXPERTS = Mixtral(
    dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=96, vocab_size=64, experts=8, active_experts=2
).account()
UP, DOWN = (f"layers.0.feed_forward.experts.{name}.weight" for name in ("w1", "w2"))


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


@pytest.mark.parametrize(
    ("shape", "cut", "tensor", "fsdp", "dim"),
    [
        # Matrices: rows, or columns of rows that tensor parallelism leaves uneven.
        ((8, 6), None, 1, 4, 0),
        ((8, 6), 0, 2, 4, 0),
        ((8, 6), 0, 2, 3, 1),
        ((8, 6), 1, 2, 3, 0),
        ((8,), None, 1, 3, 0),
        # Stacks of matrices: experts, if there are enough, or the dim that nobody else cuts.
        ((8, 6, 12), 1, 2, 4, 0),
        ((8, 6, 12), 1, 2, 3, 2),
        ((8, 12, 6), 2, 2, 3, 1),
        ((8, 12, 6), None, 1, 3, 1),
        ((8, 6, 10), 1, 2, 3, 0),
        ((8, 6, 12), 0, 2, 4, 0),
        ((8, 6, 12), 0, 2, 3, 1),
    ],
)
def test_the_dim_of_shards(shape, cut, tensor, fsdp, dim):
    assert fsdp_dim(shape, cut, tensor=tensor, fsdp=fsdp) == dim


def test_degrees_that_cut_a_parameter():
    assert account_for(EXPERTS, Layout(tensor=2)) is EXPERTS
    layout = Layout(shard=4, tensor=2, expert=4)
    account = account_for(EXPERTS, layout)
    assert cuts_of(account, "norm.weight", layout) == Cuts(tensor=2, fsdp=4)
    assert cuts_of(account, "norm.weight", layout, sharded=False) == Cuts(tensor=2, fsdp=1)
    assert cuts_of(account, UP, layout) == Cuts(tensor=4, fsdp=layout.expert_shard) == Cuts(tensor=4, fsdp=2)
    assert cuts_of(account, UP, layout, sharded=False) == Cuts(tensor=4, fsdp=1)
