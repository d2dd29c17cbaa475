"""A rank's part of a value."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titanlab.dtensor import local_part


def cut() -> tuple[list[float], list[float]]:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
    part = local_part(tensor)
    part.sum().backward()
    assert type(part) is torch.Tensor
    return part.tolist(), tensor.grad.full_tensor().tolist()


def test_a_part_is_plain_and_passes_gradients_on(pool):
    assert pool.run(2, cut) == [([0.0, 1.0], [1.0] * 4), ([2.0, 3.0], [1.0] * 4)]


def test_other_values_stay_what_they_are():
    tensor = torch.ones(2)
    assert local_part(tensor) is tensor
    assert local_part(None) is None
