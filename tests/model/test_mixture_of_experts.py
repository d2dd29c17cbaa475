"""A mixture of experts is a loop over tokens and their experts, and a grouped product one over groups."""

import pytest
import torch
import torch.nn.functional as F

from titanlab.costs import RoutedExperts
from titanlab.techniques.model.mixture_of_experts import (
    MixtureOfExperts,
    grouped_product,
    of_inputs,
    of_weight,
)


def model(count=5, active=2, dim=12, ffn_dim=20, seed=0):
    made = MixtureOfExperts(dim, ffn_dim, RoutedExperts(count=count, active=active))
    torch.manual_seed(seed)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def oracle(made, hidden):
    """Token by token, as the papers write it."""
    outputs = []
    for token in hidden.flatten(0, 1):
        probabilities = F.softmax(made.router.weight @ token, dim=-1)
        best, experts = probabilities.topk(made.router.active)
        total = torch.zeros_like(token)
        for weight, expert in zip(best / best.sum(), experts.tolist(), strict=True):
            w1, w2, w3 = (getattr(made.experts, name).weight[expert] for name in ("w1", "w2", "w3"))
            total = total + weight * (w2 @ (F.silu(w1 @ token) * (w3 @ token)))
        outputs.append(total)
    return torch.stack(outputs).view(hidden.shape)


@pytest.mark.parametrize(("count", "active"), [(5, 2), (8, 2), (3, 3), (40, 4)])
def test_it_is_a_loop_over_tokens(count, active):
    made = model(count, active)
    hidden = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = []
    for forward in (made, lambda x: oracle(made, x)):
        made.zero_grad()
        hidden.grad = None
        output = forward(hidden)
        output.square().sum().backward()
        found.append([output.detach(), hidden.grad, *(p.grad for p in made.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()


def test_an_expert_without_tokens_has_no_gradient():
    made = model(count=4, active=1)
    with torch.no_grad():
        made.router.weight.zero_()
        made.router.weight[2, 0] = 1.0
    hidden = torch.rand(1, 6, 12) + 0.1
    made(hidden).sum().backward()
    of_w1 = made.experts.w1.weight.grad.flatten(1).abs().sum(1)
    assert of_w1[2] > 0
    assert of_w1[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]


def test_the_router_computes_in_float32():
    """Two experts whose scores differ by less than bfloat16 can say."""
    made = model(count=2, active=1)
    with torch.no_grad():
        made.router.weight.fill_(1.0)
        made.router.weight[1, 0] += 1 / 64
    tokens = torch.full((1, 12), 100.0)
    for dtype in (torch.float32, torch.bfloat16):
        choice = made.to(dtype).router(tokens.to(dtype))
        assert choice.experts.tolist() == [[1]]
        assert choice.weights.dtype == torch.float32


TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Rows, groups, in, out. Sizes whose rows do not begin at multiples of 16 bytes; more groups than rows; no rows.
SHAPES = [(40, 4, 16, 24), (37, 4, 10, 7), (5, 8, 12, 9), (0, 3, 8, 8), (33, 1, 3, 1)]


def grouped(n, groups):
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, groups, (n,), generator=generator).sort()[0]
    return torch.searchsorted(chosen, torch.arange(groups), right=True, out_int32=True), generator


def loop(rows, weight, ends):
    begins = [0, *ends.tolist()[:-1]]
    parts = [rows[b:e] @ w.t() for b, e, w in zip(begins, ends.tolist(), weight, strict=True)]
    return torch.cat(parts)


def compared(n, groups, width, out, dtype, reduce):
    ends, generator = grouped(n, groups)
    rows, weight = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((n, width), (groups, out, width))
    )
    found = []
    for function in (grouped_product, loop):
        rows.grad = weight.grad = None
        product = function(rows, weight, ends)
        reduce(product).backward()
        found.append((product.detach(), rows.grad, weight.grad))
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_grouped_product_is_a_loop(shape, dtype):
    for one, other in zip(*compared(*shape, dtype, lambda product: product.float().square().sum()), strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= TOLERANCE[dtype] * other.norm()


def test_an_expanded_gradient_is_taken():
    """The gradient of a plain sum has strides of 0, which torch's function refuses."""
    for one, other in zip(*compared(40, 4, 16, 24, torch.float32, torch.sum), strict=True):
        torch.testing.assert_close(one, other)


def test_operators_have_shapes_without_data():
    """In float32 too, for which torch 2.13 has none."""
    rows, weight, ends = torch.empty(6, 10, device="meta"), torch.empty(2, 7, 10, device="meta"), torch.empty(2)
    product = grouped_product(rows, weight, ends)
    assert product.shape == (6, 7)
    assert of_inputs(product, weight, ends).shape == rows.shape
    assert of_weight(product, rows, ends).shape == weight.shape


def test_the_operator_keeps_the_rules_of_torch():
    ends, generator = grouped(12, 3)
    rows, weight = (torch.randn(shape, generator=generator, requires_grad=True) for shape in ((12, 4), (3, 8, 4)))
    torch.library.opcheck(grouped_product, (rows, weight, ends))
