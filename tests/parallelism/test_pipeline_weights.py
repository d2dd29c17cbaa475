"""Gradients of weights that come later are the same, wherever the layer is."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.parallelism.pipeline_run import TOLERANCE, Run
from titanlab.parallelism.pipeline_weights import DeferredWeights, linear


def checkpointed(name):
    """Error, and forwards of blocks in a step, where blocks are computed again in the backward."""
    forwards = []

    def wrap(stage, mesh):
        for block in stage.layers.values():
            inner = block.forward

            def again(*args, inner=inner):
                forwards.append(1)
                return inner(*args)

            block.forward = lambda *args, again=again: checkpoint(again, *args, use_reentrant=False)

    run = Run(name, 4, wrap=wrap)
    run.step()
    return run.worst(), len(forwards), 4 * sum(len(each.layers) for each in run.stages.values())


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_checkpointed_blocks_are_computed_again_once(pool, name):
    for worst, forwards, blocks in pool.run(2, checkpointed, name):
        assert worst < TOLERANCE
        assert forwards == 2 * blocks


def cut_layer():
    """Error of the gradient of a layer that is cut over two ranks, and its gradient when nothing was computed yet."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    layer, whole = nn.Linear(6, 8), nn.Linear(6, 8)
    layer.weight = nn.Parameter(distribute_tensor(whole.weight.data, mesh, [Shard(0)]))
    layer.bias = None
    layer.forward = lambda inputs: linear(layer, inputs)
    deferred = DeferredWeights(nn.Sequential(layer))
    inputs = torch.randn(2, 3, 5, 6)
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    before = []
    for microbatch in range(2):
        output = layer(inputs[microbatch])
        with deferred.collect(microbatch):
            output.square().sum().backward()
        before.append(layer.weight.grad)
    for microbatch in (1, 0):
        deferred.compute(microbatch)
        (inputs[microbatch] @ whole.weight.t()).square().sum().backward()
    assert isinstance(layer.weight.grad, DTensor)
    assert layer.weight.grad.placements == layer.weight.placements
    expected = whole.weight.grad[mine]
    return ((layer.weight.grad.to_local() - expected).norm() / expected.norm()).item(), before


def test_a_layer_that_is_cut_over_ranks(pool):
    for error, before in pool.run(2, cut_layer):
        assert error < TOLERANCE
        assert before == [None, None]


def test_biases_and_other_layers_are_computed_at_once():
    torch.manual_seed(0)
    stage, twin = (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)) for _ in range(2))
    twin.load_state_dict(stage.state_dict())
    deferred = DeferredWeights(stage)
    inputs = torch.randn(3, 5, 4)
    twin(inputs).square().sum().backward()
    with deferred.collect(0):
        stage(inputs).square().sum().backward()
    late = [name for name, parameter in stage.named_parameters() if parameter.grad is None]
    assert late == ["0.weight", "2.weight"]
    deferred.compute(0)
    for ours, theirs in zip(stage.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    # Outside of `collect` a backward is whole.
    stage(inputs).square().sum().backward()
    for ours, theirs in zip(stage.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, 2 * theirs.grad)


def test_what_was_set_aside_can_be_forgotten():
    layer = nn.Linear(4, 4)
    deferred = DeferredWeights(layer)
    with deferred.collect(0):
        layer(torch.randn(2, 4)).sum().backward()
    deferred.clear()
    with pytest.raises(KeyError):
        deferred.compute(0)
