"""What a block declares is what its module keeps and multiplies, to the byte: odd sizes, fused, any number of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.activation_memory import build, inputs
from titanlab.costs import Share, forward_flops, kept_activations
from titanlab.parallelism import join_products
from titanlab.prove.rank_trace import watch_saved_bytes
from titanlab.techniques.ac.recomputation_schema import NoCheckpointing, SelectiveOp
from titanlab.techniques.model.llama_schema import Llama, Qwen3, Qwen3Moe
from titanlab.techniques.model.mixture_of_experts import Auxiliary

BATCH, SEQ = 3, 7
SIZES = {"dim": 64, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 96, "vocab_size": 64}
ODD = {**SIZES, "dim": 60, "heads": 6, "kv_heads": 3, "ffn_dim": 77}
MODELS = {
    "one head": Llama(**{**SIZES, "heads": 1, "kv_heads": 1}),
    "one shared head": Llama(**{**SIZES, "kv_heads": 1}),
    "odd widths": Llama(**ODD),
    # Heads of 10, so that all of them together are narrower than the stream.
    "narrow heads": Qwen3(**SIZES, head_dim=10),
    "wide heads": Qwen3(**{**SIZES, "kv_heads": 4}, head_dim=18),
}
EXPERTS = Qwen3Moe(
    dim=60, layers=1, heads=4, kv_heads=2, head_dim=10, ffn_dim=77, vocab_size=64, experts=5, active_experts=2
)
DTYPES = (torch.float32, torch.bfloat16)


def as_in_training(router, config):
    router.tally = torch.zeros(config.experts + 1, requires_grad=True)
    if config.balance.startswith("auxiliary"):
        shares = None if config.balance == "auxiliary_sequence" else torch.full((config.experts,), 1 / config.experts)
        router.auxiliary = Auxiliary(shares, 1e-3, 1.0, SEQ)
    elif config.balance == "bias":
        router.bias = torch.zeros(config.experts)


def measured_and_declared(config, policy, *, batch=BATCH, seq=SEQ, dtype=torch.float32):
    """Bytes that one block keeps on a CPU, and those that its account says."""
    stack = build(config, NoCheckpointing(), dtype)
    if config.routed:
        as_in_training(stack.layers["0"].feed_forward.router, config)
    join_products(stack, config.account().joined, None)
    policy.implementation().apply({0: stack.layers["0"]})
    hidden, rope = inputs(config, batch=batch, seq=seq, dtype=dtype)
    saved = watch_saved_bytes({0: stack.layers["0"]})
    stack(hidden * 1, rope).sum().backward()
    share = Share(element_bytes=dtype.itemsize, accelerator="cpu")
    block = config.block_operations(batch=batch, seq_len=seq)
    return saved[0], policy.saved_bytes(block, share, number=0)


@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (3, 7)])
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("model", MODELS)
def test_a_block_keeps_every_byte_that_it_declares(model, fused, batch, seq):
    config = replace(MODELS[model], fused=fused)
    for dtype in DTYPES:
        measured, declared = measured_and_declared(config, NoCheckpointing(), batch=batch, seq=seq, dtype=dtype)
        assert measured == declared, dtype


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("model", ["one shared head", "narrow heads", "wide heads"])
def test_attention_that_writes_out_its_scores_keeps_copies(model, fused):
    """Of fused projections nothing is kept then: norms and attention have copies in float32 of all their parts."""
    config = replace(MODELS[model], fused=fused, attention="math")
    measured, declared = measured_and_declared(config, NoCheckpointing(), dtype=torch.bfloat16)
    assert measured == declared


@pytest.mark.parametrize("attention", ["auto", "math"])
def test_on_a_gpu_the_norms_of_heads_keep_the_whole_tensor_of_fused_projections(attention):
    """The kernel of the norm keeps its input, a part of that tensor; so the values stay, also if they are copied."""
    apart = replace(MODELS["wide heads"], kv_heads=2, attention=attention)
    bytes_of = {
        fused: Share(element_bytes=2).bytes_of(
            kept_activations(replace(apart, fused=fused).block_operations(batch=3, seq_len=7))
        )
        for fused in (False, True)
    }
    values = 3 * 7 * 2 * 18
    # Other kernels keep the values themselves, in a tensor of their own or in that of all.
    assert bytes_of[True] - bytes_of[False] == (2 * values if attention == "math" else 0)


OPERATORS = [
    "aten.mm.default",
    "aten.mul.Tensor",
    "aten.add.Tensor",
    "aten.silu.default",
    "aten.pow.Tensor_Scalar",
    "aten.rsqrt.default",
    "aten.bmm.default",
    "aten.mul.Scalar",
    "aten._safe_softmax.default",
]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_saved_operator_keeps_every_byte_that_it_declares(operator):
    """One block with norms of heads, whose attention writes out its scores, has all of these operators."""
    config = replace(MODELS["narrow heads"], attention="math")
    policy = SelectiveOp(saved=[operator], every_other_matmul=False)
    measured, declared = measured_and_declared(config, policy)
    assert measured == declared
    assert measured > 3 * 7 * config.dim * 4  # More than the input of the block.


@pytest.mark.parametrize("model", MODELS)
def test_fused_projections_multiply_as_much_as_torch_counts(model):
    # Of the kernels of attention, torch counts only products that are written out.
    config = replace(MODELS[model], fused=True, attention="math")
    stack = build(config, NoCheckpointing(), torch.float32)
    join_products(stack, config.account().joined, None)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stack(*inputs(config, batch=3, seq=7, dtype=torch.float32))
    block = config.block_operations(batch=3, seq_len=7)
    assert counter.get_total_flops() == forward_flops(block)
    apart = replace(config, fused=False).block_operations(batch=3, seq_len=7)
    assert forward_flops(block) == forward_flops(apart)


@pytest.mark.parametrize("balance", ["bias", "auxiliary_batch", "auxiliary_sequence", "none"])
@pytest.mark.parametrize(("experts", "active"), [(5, 2), (3, 3), (8, 5)])
def test_a_block_with_experts_keeps_every_byte_that_it_declares(experts, active, balance):
    config = replace(EXPERTS, experts=experts, active_experts=active, balance=balance)
    for dtype in DTYPES:
        measured, declared = measured_and_declared(config, NoCheckpointing(), dtype=dtype)
        assert measured == declared, dtype


OPERATORS_OF_EXPERTS = [
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


@pytest.mark.parametrize("operator", OPERATORS_OF_EXPERTS)
def test_a_saved_operator_of_experts_keeps_every_byte_that_it_declares(operator):
    config = replace(EXPERTS, balance="none", active_experts=3)
    policy = SelectiveOp(saved=[operator], every_other_matmul=False)
    for dtype in DTYPES:
        measured, declared = measured_and_declared(config, policy, dtype=dtype)
        assert measured - declared in (0, 4), dtype  # The sum of entropies, which the tally keeps.
        assert declared > BATCH * SEQ * config.dim * dtype.itemsize
