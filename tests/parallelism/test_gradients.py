"""Norm and scaling of gradients, whole or spread over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from titanlab.parallelism import Gradients


def parameter(gradient):
    found = nn.Parameter(torch.zeros_like(gradient))
    found.grad = gradient
    return found


def exact(*gradients):
    return sum(gradient.double().square().sum() for gradient in gradients)


@pytest.mark.parametrize("shape", [(1 << 12, 1 << 10), (1 << 17, 8), (1 << 10, 64, 64)])
def test_the_norm_of_a_large_gradient_is_exact(shape):
    """Halves must give the norm of the whole, or layouts would differ: summed in fp32 at once they are off by 2e-5."""
    gradient = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    found = Gradients([parameter(gradient)], 1).squared_norm()
    assert found.item() == pytest.approx(exact(gradient).item(), rel=1e-6)


def test_parameters_without_a_gradient_are_passed_over_and_scaling_keeps_the_dtype():
    with_gradient = parameter(torch.ones(4))
    gradients = Gradients([nn.Parameter(torch.ones(2)), with_gradient], 1)
    assert (gradients.squared_norm(), gradients.squared_norm().dtype) == (4, torch.float64)
    gradients.scale(torch.tensor(0.5, dtype=torch.float64))
    assert with_gradient.grad.dtype == torch.float32
    assert with_gradient.grad.tolist() == [0.5] * 4


def spread(shape, names, placements, sizes):
    """Each rank's share of the squared norm, and the whole gradients after scaling by 0.5."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    parameters = []
    for number, size in enumerate(sizes):
        whole = torch.arange(1.0, torch.Size(size).numel() + 1).view(size) + number
        made = nn.Parameter(distribute_tensor(torch.zeros(size), mesh, placements))
        made.grad = distribute_tensor(whole, mesh, placements)
        parameters.append(made)
    gradients = Gradients(parameters, mesh.size())
    total = gradients.squared_norm()
    dist.all_reduce(total)
    gradients.scale(torch.tensor(0.5))
    return total.item(), [made.grad.full_tensor() for made in parameters if isinstance(made.grad, DTensor)]


@pytest.mark.parametrize(
    ("shape", "names", "placements"),
    [
        ((2,), ("shard",), [Shard(0)]),
        ((2, 2), ("replicate", "shard"), [Replicate(), Shard(0)]),
        ((4,), ("shard",), [Shard(0)]),
        ((2, 1), ("replicate", "shard"), [Replicate(), Shard(0)]),
    ],
)
def test_shares_sum_to_the_norm_in_any_layout(pool, shape, names, placements):
    # With three rows, four ranks hold 1, 1, 1 and 0 of them.
    sizes = [(3, 5), (8,), (1, 2)]
    whole = [torch.arange(1.0, torch.Size(size).numel() + 1).view(size) + number for number, size in enumerate(sizes)]
    for total, scaled in pool.run(torch.Size(shape).numel(), spread, shape, names, placements, sizes):
        assert total == pytest.approx(exact(*whole).item(), rel=1e-6)
        assert all(torch.equal(found, gradient / 2) for found, gradient in zip(scaled, whole, strict=True))
