"""Which kernel attention asks for, by device and dtype: GPUs are told of, not there."""

import contextlib
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from titanlab.techniques.model import attention
from titanlab.techniques.model.attention import InnerAttention

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH


def inputs(dtype=torch.float32, *, kv_heads=2):
    torch.manual_seed(0)
    return [
        torch.randn(2, 8, heads, 16, dtype=dtype, requires_grad=True).transpose(1, 2)
        for heads in (4, kv_heads, kv_heads)
    ]


@pytest.fixture
def asked(monkeypatch):
    """What torch is asked for: a list of kernels for each attention."""
    found = []

    def kernels(backends, *, set_priority):
        assert set_priority
        found.append(backends)
        return contextlib.nullcontext()

    monkeypatch.setattr(attention, "sdpa_kernel", kernels)
    return found


def prepared(monkeypatch, name, capability):
    module = InnerAttention(name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    module.prepare(torch.device("cuda", 0))
    return module


@pytest.mark.parametrize(("capability", "first"), [((8, 0), FLASH), ((9, 0), CUDNN)])
def test_auto_asks_a_gpu_for_its_fastest_and_has_others_in_reserve(monkeypatch, asked, capability, first):
    module = prepared(monkeypatch, "auto", capability)
    q, k, v = inputs(torch.bfloat16)
    shared = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(module(q, k, v), shared)
    assert asked[0][0] == first
    assert set(asked[0]) == {FLASH, CUDNN, EFFICIENT, MATH}
    assert asked[0][-1] == MATH


def test_auto_in_32_bits_is_computed_by_the_kernel_that_takes_no_shared_heads(monkeypatch, asked):
    module = prepared(monkeypatch, "auto", (9, 0))
    seen = []
    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *qkv, **how: seen.append(how) or plain(*qkv, **how))
    q, k, v = inputs()
    torch.testing.assert_close(module(q, k, v), plain(q, k, v, is_causal=True, enable_gqa=True))
    assert seen[0]["enable_gqa"] is False


def test_a_cpu_is_left_to_torch(asked):
    module = InnerAttention("auto")
    module.prepare(torch.device("cpu"))
    module(*inputs())
    assert asked == []


def test_a_kernel_that_is_named_is_the_only_one(asked):
    q, k, v = inputs()
    outputs = {name: InnerAttention(name)(q, k, v) for name in ("auto", "efficient", "cudnn", "math", "flash")}
    assert asked == [[EFFICIENT], [CUDNN], [MATH], [FLASH]]
    # `efficient` is given as many key/value heads as there are of queries.
    for output in outputs.values():
        torch.testing.assert_close(output, outputs["auto"])


def test_the_package_is_given_tokens_before_heads(monkeypatch):
    def flash_attn_func(q, k, v, *, causal):
        assert causal
        assert (q.shape, k.shape) == ((2, 8, 4, 16), (2, 8, 2, 16))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    module = InnerAttention("flash_attn")
    module.prepare(torch.device("cuda", 0))
    q, k, v = inputs()
    torch.testing.assert_close(module(q, k, v), InnerAttention("auto")(q, k, v))


def test_a_package_that_is_not_there_is_missed_before_the_first_step():
    with pytest.raises(ImportError):
        InnerAttention("flash_attn").prepare(torch.device("cuda", 0))


def test_an_order_of_kernels_is_no_graph_break(monkeypatch):
    module = prepared(monkeypatch, "auto", (9, 0))
    q, k, v = inputs()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), module(q, k, v))
    before = torch._C._get_sdp_priority_order()
    compiled(q, k, v).sum().backward()
    # What was asked for holds inside only.
    assert torch._C._get_sdp_priority_order() == before


@pytest.mark.parametrize(("name", "copies"), [("cudnn", True), ("auto", True), ("flash", False)])
def test_cudnn_gets_gradients_of_one_layout(asked, monkeypatch, name, copies):
    q, k, v = inputs(torch.bfloat16)
    strides = []

    def computed(q, k, v, **_):
        output = q.clone()
        output.register_hook(lambda gradient: strides.append(gradient.stride()))
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", computed)
    by_head = torch.randn(2, 4, 8, 16, dtype=torch.bfloat16)
    output = prepared(monkeypatch, name, (9, 0))(q, k, v)
    (gradient,) = torch.autograd.grad(output, q, by_head)
    assert torch.equal(gradient, by_head)
    assert strides == [q.stride() if copies else by_head.stride()]
