"""FSDP2 over symmetric memory, without GPUs: what each unit is told, in which order, and that sums stay the same."""

import collections
import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from tests import tiny
from titanlab.distributed import build_mesh, joined, open_world
from titanlab.errors import ConfigError
from titanlab.parallelism import shard
from titanlab.prove import parity
from titanlab.train import StepBatch
from titanlab.train.assemble import assemble


def traced(made, run):
    """A run's trace, and for each unit that is given symmetric memory whether its sums are sums by then."""
    told = []

    def set_memory(unit):
        (group,) = unit._get_fsdp_state()._fsdp_param_groups
        told.append(group.force_sum_reduction_for_comms)

    with (
        patch.object(FSDPModule, "set_symm_mem_for_comm", set_memory),
        patch.object(dist, "get_backend", lambda group=None: "nccl"),
    ):
        return parity.trace(made, run, joined(os.environ)), told


@pytest.mark.parametrize("layout", [{"shard": 2}, pytest.param({"shard": 2, "replicate": 2}, marks=pytest.mark.full)])
def test_every_unit_sums_and_then_divides(pool, tmp_path, layout):
    world = 2 * layout.get("replicate", 1)
    found = []
    for symmetric in (False, True):
        # Behind the rule's back, which refuses a CPU.
        made = tiny.recipe(tmp_path, name=f"run-{symmetric}", steps=3, at_end=False, **layout)
        run = tiny.begin(made)
        made = replace(made, parallelism=replace(made.parallelism, symmetric_memory=symmetric))
        found.append(pool.run(world, traced, made, run)[0])
    (plain, none), (trace, told) = found
    assert none == []
    # Two blocks and the rest of the model.
    assert told == [True] * 3
    assert trace.losses == pytest.approx(plain.losses, rel=1e-6)
    assert trace.grad_norms == pytest.approx(plain.grad_norms, rel=1e-6)


def refused_on_gloo():
    dist.init_process_group("gloo")
    with pytest.raises(ConfigError, match="symmetric_memory=true: is memory of NCCL, and a group of FSDP2 uses gloo"):
        shard.use_symmetric_memory([], [dist.group.WORLD])


def test_another_backend_is_refused(pool):
    pool.run(1, refused_on_gloo)


def test_a_torch_without_it_is_refused(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_symm_mem_for_comm")
    with pytest.raises(ConfigError, match="needs FSDPModule.set_symm_mem_for_comm, which this torch does not have"):
        shard.use_symmetric_memory([], [])


# How gradients meet: once a step, however many microbatches it has


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
