"""How gradients meet: once a step, however many microbatches it has; and what is held between steps."""

import collections
import os

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from tests import tiny
from titanlab.distributed import build_mesh, joined, open_world
from titanlab.train import StepBatch
from titanlab.train.assemble import assemble


def collectives(made):
    """How often each collective runs in one step, and whether parameters are in parts after it and after evaluating."""
    with open_world(joined(os.environ), accelerator="cpu", seed=0, deterministic=False) as world:
        assembled = assemble(made, world, build_mesh(made.layout, "cpu"))
        tokens = torch.zeros(made.local_batch, made.training.seq_len, dtype=torch.int64)
        batch = StepBatch(tokens, tokens, tokens.numel())
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
            assembled.forward_backward(batch)
        # Where they are issued: gloo's own thread may write its events down when the profiler has stopped.
        counts = collections.Counter(each.name for each in profiled.events() if each.name.startswith("c10d::"))
        parts = [{type(parameter.data) for parameter in assembled.model.parameters()}]
        assembled.evaluate(batch)
        parts.append({type(parameter.data) for parameter in assembled.model.parameters()})
    return counts, parts


@pytest.mark.parametrize(
    ("layout", "gathers", "reductions", "held"),
    [
        # The first block is gathered for each forward and each backward; the last one and the rest, which the
        # backward needs at once, stay whole for all microbatches.
        ({"shard": 2}, lambda microbatches: 2 * microbatches + 2, 3, DTensor),
        pytest.param(
            {"shard": 2, "reshard_after_forward": "never"}, lambda microbatches: 3, 3, DTensor, marks=pytest.mark.full
        ),
        ({"replicate": 2}, lambda microbatches: 0, 1, torch.Tensor),
    ],
    ids=["fsdp", "never", "ddp"],
)
def test_gradients_are_reduced_once_a_step(pool, tmp_path, layout, gathers, reductions, held):
    for microbatch, count in ((6, 1), (2, 3)):
        made = tiny.recipe(tmp_path, microbatch=microbatch, **layout)
        for counts, parts in pool.run(2, collectives, made):
            # gloo would scatter what it has reduced by reducing all: parts are exchanged instead.
            assert counts["c10d::allreduce_"] + counts["c10d::alltoall_base_"] == reductions
            assert counts["c10d::_allgather_base_"] == gathers(count)
            assert counts.total() == reductions + gathers(count)
            assert parts == [{held}, {held}]
