"""What only a GPU can show: the fused attention kernels, and the same trainer on the device. Left out elsewhere."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests import tiny
from titanlab.cluster.schema import Cluster
from titanlab.outcome import OutcomeKind
from titanlab.parallelism import attention_kernels, head_tail
from titanlab.parity import _Tracer

pytestmark = pytest.mark.gpu


class NoOthers:
    """An exchange for a rank that is alone."""

    def blocks(self):
        return iter(())

    def give(self, gradients, into):
        raise AssertionError("there is nobody to give to")

    def collect(self, into):
        pass


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("flash", torch.bfloat16),
        ("cudnn", torch.bfloat16),
        ("efficient", torch.bfloat16),
        ("efficient", torch.float32),
    ],
)
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_attention_put_together_of_parts_is_that_of_the_whole(name, dtype, kv_heads):
    torch.manual_seed(0)
    shapes = [(2, 200, heads, 64) for heads in (8, kv_heads, kv_heads, 8)]
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    kernel = attention_kernels._KERNELS[name]
    out, lse = head_tail.forward(NoOthers(), q, k, v, kernel)
    found = (out, *head_tail.backward(NoOthers(), grad, q, k, v, out, lse, kernel))
    exact = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    whole = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    whole.backward(grad.double().transpose(1, 2))
    for mine, expected in zip(found, (whole.detach(), *(x.grad for x in exact)), strict=True):
        # Roundings of 8 bits of mantissa, or of 24 with kernels that may take TF32's 11 for products.
        bound = 2**-6 if dtype is torch.bfloat16 else 2**-9
        difference = (mine.double() - expected.transpose(1, 2)).norm() / expected.norm()
        assert difference < bound, (name, float(difference))


@pytest.mark.parametrize("attention", ["auto", "flash"])
def test_one_gpu_trains_in_bf16_as_a_cpu_does(tmp_path, attention):
    losses = []
    for accelerator in ("cpu", "cuda"):
        made = tiny.recipe(tmp_path, name=f"on-{accelerator}", steps=5, bf16=True, attention=attention)
        made = replace(made, cluster=Cluster(accelerator=accelerator, device=accelerator, peak_tflops=1.0))
        tracer = _Tracer()
        outcome = tiny.as_rank(made, tiny.begin(made), tracer)
        assert outcome.kind is OutcomeKind.DONE
        losses.append(tracer.trace.losses)
    # Both round to 8 bits of mantissa, in another order.
    assert losses[1] == pytest.approx(losses[0], rel=2**-7)
