"""Attention in tiles of queries is attention: results, gradients, FLOPs; and its sizes are chosen in one place."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from titanlab.techniques.model.attention import InnerAttention
from titanlab.techniques.model.documents import Tiling, tiled_attention, tiling
from titanlab.techniques.model.llama_schema import Llama


def inputs(seq_len, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, batch=2):
    torch.manual_seed(0)
    return [
        torch.randn(batch, seq_len, count, head_dim, dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def computed(attend, given, gradient):
    output = attend(*given)
    return [output, *torch.autograd.grad(output, given, gradient.to(output.dtype))]


def whole(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def errors(found, exact):
    return [((one.double() - other).norm() / other.norm()).item() for one, other in zip(found, exact, strict=True)]


# One tile, whole tiles, and a last tile that is not full, of one row too; heads that are shared and not.
@pytest.mark.parametrize(("seq_len", "kv_heads"), [(64, 2), (192, 1), (129, 4), (150, 2)])
@pytest.mark.parametrize(("dtype", "how", "bar"), [
    (torch.float32, Tiling(64, in_float32=True), 1e-6),
    (torch.bfloat16, Tiling(64, in_float32=True), 3e-3),
    (torch.bfloat16, Tiling(64, in_float32=False), 1e-2),
])  # fmt: skip
def test_tiles_are_the_whole(seq_len, kv_heads, dtype, how, bar):
    given = inputs(seq_len, kv_heads=kv_heads, dtype=dtype)
    gradient = torch.randn(given[0].shape, dtype=torch.float64)
    exact = computed(whole, [x.detach().double().requires_grad_() for x in given], gradient.to(dtype).double())
    found = computed(lambda *qkv: tiled_attention(*qkv, None, *how)[0], given, gradient)
    assert max(errors(found, exact)) < bar
    torchs = computed(whole, given, gradient)
    assert [(x.dtype, x.stride()) for x in found] == [(x.dtype, x.stride()) for x in torchs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_short_sequences_on_a_cpu_are_cut(dtype):
    def chosen(seq_len, head_dim=16):
        return tiling(*inputs(seq_len, head_dim=head_dim, dtype=dtype, batch=1))

    assert chosen(64) is chosen(2048) is chosen(512, head_dim=256) is None
    assert chosen(128) == chosen(512) == Tiling(64, in_float32=True)
    on_meta = [x.to("meta") for x in inputs(512, dtype=dtype)]
    assert tiling(*on_meta) is None
    # Other kinds of attention than of a sequence with itself.
    q, k, v = inputs(512, dtype=dtype, batch=1)
    assert tiling(q[:, :, :256], k, v) is tiling(q.double(), k.double(), v.double()) is None


def test_the_module_cuts_only_if_the_kernel_is_not_named():
    given = inputs(192)
    names = []
    for kernel in ("auto", "flash"):
        output = InnerAttention(kernel)(*given)
        names.append(output.grad_fn.name())
        torch.testing.assert_close(output, whole(*given))
    assert "tiled_attention" in names[0]
    assert "tiled_attention" not in names[1]


def test_flops_are_those_of_the_whole_square():
    config = Llama(dim=64, layers=1, heads=4, kv_heads=2, ffn_dim=64, vocab_size=64)
    (declared,) = (each for each in config.block_operations(batch=2, seq_len=192) if each.kind == "attention")
    given = inputs(192)
    with FlopCounterMode(display=False) as counter:
        output = InnerAttention()(*given)
    assert counter.get_total_flops() == declared.flops
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    # As torch counts its own kernels: five products instead of two.
    assert counter.get_total_flops() == 5 * declared.flops // 2


def test_the_operator_is_what_it_says_without_data():
    torch.library.opcheck(
        tiled_attention, (*inputs(192), None, 64, True), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.full
def test_compilers_see_one_operator():
    given = inputs(192)
    module = InnerAttention()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    gradient = torch.randn(given[0].shape)
    for one, other in zip(computed(compiled, given, gradient), computed(module, given, gradient), strict=True):
        assert torch.equal(one, other)
