"""The table of kernels: those of CUDA by their operators' own signatures, since they need no GPU for shapes."""

import types

import pytest
import torch

from titanlab.costs import order
from titanlab.parallelism import attention_kernels
from titanlab.parallelism.attention_kernels import KERNELS, choose


def tensors(dtype, device="meta", *, rows=40, keys=24, kv_heads=2, head_dim=32):
    """Transposed views, as a model gives them."""
    q, k, v = (
        torch.randn(3, size, heads, head_dim, dtype=dtype, device=device).transpose(1, 2)
        for size, heads in ((rows, 4), (keys, kv_heads), (keys, kv_heads))
    )
    return q, k, v


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *((name, torch.bfloat16) for name in ("flash", "cudnn", "efficient")),
        ("efficient", torch.float32),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_operators_take_and_give_what_the_table_says(kernel, dtype, causal):
    kernel = KERNELS[kernel]
    # 40 rows are not a multiple of the 32 that one kernel pads to.
    q, k, v = tensors(dtype, keys=40 if causal else 24)
    out, lse = kernel.forward(q, k, v, causal=causal)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    # Denominators come back as a slice of those of the whole, in another layout.
    lse = torch.empty(3, 80, 4, device="meta")[:, 40:].transpose(1, 2)
    gradients = kernel.backward(out, q, k, v, out, lse, causal=causal)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, dtype) for x in (q, k, v)]


def test_cudnn_gets_outputs_and_gradients_of_one_layout(monkeypatch):
    # Slices of a longer sequence, and a gradient whose heads lie apart.
    q, k, v = tensors(torch.bfloat16, "cpu", rows=24)
    out = torch.randn(3, 48, 4, 32, dtype=torch.bfloat16)[:, 24:].transpose(1, 2)
    grad = torch.randn(3, 4, 24, 32, dtype=torch.bfloat16)
    given = []
    operator = types.SimpleNamespace(default=lambda *arguments: given.append(arguments) or (q, k, v))
    stand_in = types.SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=operator)
    monkeypatch.setattr(attention_kernels, "aten", stand_in)
    KERNELS["cudnn"].backward(grad, q, k, v, out, torch.randn(3, 4, 24), causal=False)
    given_grad, _, _, _, given_out, *_ = given[0]
    for mine, expected in ((given_grad, grad), (given_out, out)):
        assert torch.equal(mine, expected)
        assert mine.stride() == q.stride()


@pytest.mark.parametrize(
    ("asked", "able", "chosen"),
    [
        ("auto", {"flash", "cudnn", "efficient"}, "flash"),
        ("auto", {"efficient"}, "efficient"),
        ("flash", {"efficient"}, "efficient"),
        ("cudnn", {"flash", "cudnn", "efficient"}, "cudnn"),
        ("cudnn", {"flash", "efficient"}, "flash"),
        ("efficient", {"flash", "cudnn", "efficient"}, "efficient"),
        ("efficient", {"flash"}, "flash"),
    ],
)
def test_the_kernel_asked_for_or_the_next_that_can(monkeypatch, asked, able, chosen):
    for name in ("flash", "cudnn", "efficient"):
        monkeypatch.setitem(attention_kernels._CAN_USE, name, lambda parameters, name=name: name in able)
    assert choose(asked, *tensors(torch.bfloat16)) is KERNELS[chosen]


def test_a_hopper_asks_for_another_kernel_first(monkeypatch):
    monkeypatch.setattr(attention_kernels, "order", lambda name, capability, **inputs: order(name, (9, 0), **inputs))
    for name in ("flash", "cudnn", "efficient"):
        monkeypatch.setitem(attention_kernels._CAN_USE, name, lambda parameters: True)
    assert choose("auto", *tensors(torch.bfloat16)) is KERNELS["cudnn"]
    assert choose("flash", *tensors(torch.bfloat16)) is KERNELS["flash"]
    monkeypatch.setitem(attention_kernels._CAN_USE, "cudnn", lambda parameters: False)
    assert choose("auto", *tensors(torch.bfloat16)) is KERNELS["flash"]


def test_no_kernel_at_all_is_told(monkeypatch):
    # torch's own answers take a driver where torch is built for CUDA.
    for name in attention_kernels._CAN_USE:
        monkeypatch.setitem(attention_kernels._CAN_USE, name, lambda parameters: False)
    with pytest.raises(RuntimeError, match="no attention kernel of meta takes torch.float64 with a head_dim of 31"):
        choose("auto", *tensors(torch.float64, head_dim=31))
