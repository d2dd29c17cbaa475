"""The grouped product is a loop over groups, forward and backward, for every dtype and every shape."""

import pytest
import torch

from titanlab.techniques.model.mixture_of_experts import grouped_product, of_inputs, of_weight

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Rows, groups, in, out. Sizes whose rows do not begin at multiples of 16 bytes; more groups than rows; no rows.
SHAPES = [(40, 4, 16, 24), (37, 4, 10, 7), (5, 8, 12, 9), (0, 3, 8, 8), (33, 1, 3, 1)]


def made(n, groups, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, groups, (n,), generator=generator).sort()[0]
    return torch.searchsorted(chosen, torch.arange(groups), right=True, out_int32=True), generator


def loop(rows, weight, ends):
    begins = [0, *ends.tolist()[:-1]]
    parts = [rows[b:e] @ w.t() for b, e, w in zip(begins, ends.tolist(), weight, strict=True)]
    return torch.cat(parts)


def compared(n, groups, width, out, dtype, reduce):
    ends, generator = made(n, groups, dtype)
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
def test_it_is_a_loop(shape, dtype):
    for one, other in zip(*compared(*shape, dtype, lambda product: product.float().square().sum()), strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= TOLERANCE[dtype] * other.norm()


def test_an_expanded_gradient_is_taken():
    """The gradient of a plain sum has strides of 0, which torch's function refuses."""
    for one, other in zip(*compared(40, 4, 16, 24, torch.float32, torch.sum), strict=True):
        torch.testing.assert_close(one, other)


def test_groups_without_rows_get_zero_gradients():
    ends = torch.tensor([0, 5, 5], dtype=torch.int32)
    gradient = of_weight(torch.ones(5, 4), torch.ones(5, 8), ends)
    assert gradient.flatten(1).sum(1).tolist() == [0.0, 160.0, 0.0]


def test_operators_have_shapes_without_data():
    """In float32 too, for which torch 2.13 has none."""
    rows, weight, ends = torch.empty(6, 10, device="meta"), torch.empty(2, 7, 10, device="meta"), torch.empty(2)
    product = grouped_product(rows, weight, ends)
    assert product.shape == (6, 7)
    assert of_inputs(product, weight, ends).shape == rows.shape
    assert of_weight(product, rows, ends).shape == weight.shape


def test_the_operator_keeps_the_rules_of_torch():
    ends, generator = made(12, 3, torch.float32)
    rows, weight = (torch.randn(shape, generator=generator, requires_grad=True) for shape in ((12, 4), (3, 8, 4)))
    torch.library.opcheck(grouped_product, (rows, weight, ends))
