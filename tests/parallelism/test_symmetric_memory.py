"""FSDP2 over symmetric memory, without GPUs: what each unit is told, in which order, and that sums stay the same."""

import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests import tiny
from titanlab.distributed import joined
from titanlab.errors import ConfigError
from titanlab.parallelism import shard
from titanlab.prove import parity


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
