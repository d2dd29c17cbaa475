"""What a block with experts declares is what its module keeps and has, to the byte: any number of experts, any balance."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from benchmarks.activation_memory import build, inputs
from titanlab.costs import Share
from titanlab.prove.rank_trace import SavedBytes
from titanlab.techniques.ac.recomputation_schema import NoCheckpointing, SelectiveOp
from titanlab.techniques.model.llama_schema import Qwen3Moe
from titanlab.techniques.model.mixture_of_experts import Auxiliary

BATCH, SEQ = 3, 7
CONFIG = Qwen3Moe(
    dim=60, layers=1, heads=4, kv_heads=2, head_dim=10, ffn_dim=77, vocab_size=64, experts=5, active_experts=2
)
BFLOAT16 = torch.bfloat16


def counting(router, config):
    """A router as training sets it."""
    router.tally = torch.zeros(config.experts + 1, requires_grad=True)
    if config.balance.startswith("auxiliary"):
        shares = None if config.balance == "auxiliary_sequence" else torch.full((config.experts,), 1 / config.experts)
        router.auxiliary = Auxiliary(shares, 1e-3, 1.0, SEQ)
    elif config.balance == "bias":
        router.bias = torch.zeros(config.experts)


def measured_and_declared(config, policy, dtype):
    """Bytes that one block keeps on a CPU, and those that its account says."""
    stack = build(config, NoCheckpointing(), dtype)
    counting(stack.layers["0"].feed_forward.router, config)
    policy.implementation().apply({0: stack.layers["0"]})
    hidden, rope = inputs(config, batch=BATCH, seq=SEQ, dtype=dtype)
    saved = SavedBytes({0: stack.layers["0"]})
    stack(hidden * 1, rope).sum().backward()
    share = Share(element_bytes=dtype.itemsize, accelerator="cpu")
    block = config.block_operations(batch=BATCH, seq_len=SEQ)
    return saved.by_block[0], policy.saved_bytes(block, share, number=0)


@pytest.mark.parametrize("balance", ["bias", "auxiliary_batch", "auxiliary_sequence", "none"])
@pytest.mark.parametrize(("experts", "active"), [(5, 2), (3, 3), (8, 5)])
def test_a_block_keeps_every_byte_that_it_declares(experts, active, balance):
    config = dataclasses.replace(CONFIG, experts=experts, active_experts=active, balance=balance)
    for dtype in (torch.float32, BFLOAT16):
        measured, declared = measured_and_declared(config, NoCheckpointing(), dtype)
        assert measured == declared, dtype


OPERATORS = [
    "aten.mm.default",
    "titanlab.grouped_product.default",
    "aten.silu.default",
    "aten.mul.Tensor",
    "aten.index_select.default",
    "aten.sum.dim_IntList",
    "aten._softmax.default",
    "aten.topk.default",
    "aten.gather.default",
    "aten.div.Tensor",
]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_saved_operator_keeps_every_byte_that_it_declares(operator):
    config = dataclasses.replace(CONFIG, balance="none", active_experts=3)
    policy = SelectiveOp(saved=[operator], every_other_matmul=False)
    for dtype in (torch.float32, BFLOAT16):
        measured, declared = measured_and_declared(config, policy, dtype)
        assert measured - declared in (0, 4), dtype  # The sum of entropies, which the tally keeps.
        assert declared > BATCH * SEQ * config.dim * dtype.itemsize


def test_products_have_a_row_for_each_expert_of_a_token():
    """2 FLOPs for each weight of the chosen experts, and for the router's of all; by hand."""
    config = dataclasses.replace(CONFIG, experts=8, active_experts=5)
    block = config.block_operations(batch=BATCH, seq_len=SEQ)
    flops = {each.name: each.flops for each in block if each.name.startswith("feed_forward.") and each.flops}
    tokens, width = BATCH * SEQ, 60 * 77
    products = {f"feed_forward.experts.{name}": 2 * tokens * 5 * width for name in ("w1", "w3", "w2")}
    assert flops == {"feed_forward.router": 2 * tokens * 60 * 8, **products}
    assert {each.name: each.groups for each in block if each.groups > 1} == dict.fromkeys(products, 8)


def test_experts_travel_only_with_expert_parallelism():
    """Each of two ranks gets as many rows as it sends, and of the rows it keeps those of half the tokens."""
    config = dataclasses.replace(CONFIG, experts=4, balance="none")
    block = config.block_operations(batch=2, seq_len=8)
    one, two = Share(element_bytes=2), Share(element_bytes=2, tensor=2, expert=2)
    by_name = {each.name: each for each in block}
    exchange = by_name["feed_forward.exchange"]
    assert one.bytes_of(exchange.keeps) == 0
    # Counts that it sends and gets, of all experts, and 8 bytes for the place of each of its rows.
    rows = 2 * 8 * 2 // 2
    assert two.bytes_of(exchange.keeps) == 2 * 4 * 8 + rows * 8
    assert two.bytes_of(by_name["feed_forward.experts.w2"].keeps) == rows * 77 * 2 + 4 * 4 // 2
    assert one.bytes_of(by_name["feed_forward.experts.w2"].keeps) == 2 * rows * 77 * 2 + 4 * 4
    # Without expert parallelism, tensor parallelism cuts the width of experts instead, 77 columns in parts of 38.5.
    halves = Share(element_bytes=2, tensor=2)
    assert halves.bytes_of(by_name["feed_forward.experts.w2"].keeps) == math.floor(2 * rows * 77 * 2 / 2) + 4 * 4
