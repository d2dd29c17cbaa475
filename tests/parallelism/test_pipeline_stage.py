"""What stages send, and how long they hold what."""

import collections
import gc
import weakref

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

from tests.parallelism.pipeline_run import SCHEDULES, Run, full, scheduled, shard
from tests.pool import RankFailure
from titanlab.parallelism import loss_sum


def traffic(name):
    run = Run(name, 4, data=2, wrap=shard(reshard=False))
    stages = run.stages.values()
    run.step()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        run.step()
    counts = collections.Counter(each.name for each in profiled.events() if each.name.startswith("c10d::"))
    beside_blocks = [any(not name.startswith("layers.") for name, _ in each.named_parameters()) for each in stages]
    return dict(counts), sum(beside_blocks) + sum(len(each.layers) for each in stages)


@pytest.mark.parametrize("name", [full("1f1b"), "zbv"])
def test_a_step_gathers_and_reduces_once_and_sends_only_hidden_states(pool, name):
    for counts, units in pool.run(4, traffic, name):
        _, placement = scheduled(name, 2, 4)
        crossings = sum(a != b for a, b in zip(placement, placement[1:], strict=False))
        assert counts["c10d::_allgather_base_"] == units
        assert counts["c10d::_reduce_scatter_base_"] == units
        assert counts["c10d::send"] == counts["c10d::recv_"] == 4 * crossings
        assert set(counts) == {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::send", "c10d::recv_"}


def mixed_but_not_told(name):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    Run(name, 4, wrap=shard(False, policy)).step()


def test_another_dtype_than_agreed_is_refused(pool):
    with pytest.raises(RankFailure, match=r"the hidden state is a Tensor \[2, 16, 32\] of torch.bfloat16"):
        # The other rank waits for a hidden state that does not come.
        pool.run(2, mixed_but_not_told, "1f1b", limit_seconds=30, grace_seconds=0.1)


def held(name):
    """How many logits, hidden states and inputs of blocks are alive when a later one comes, and after a step."""
    calls, alive, logits_before, seen = 0, [], [], []

    def loss(logits, labels):
        nonlocal calls
        calls += 1
        alive.append(sum(each() is not None for each in logits_before))
        logits_before.append(weakref.ref(logits))
        return loss_sum(logits, labels)

    def watch(stage, mesh):
        def remember(_, inputs, output):
            # The projections of an attention block return several tensors.
            outputs = output if isinstance(output, tuple) else (output,)
            seen.extend(weakref.ref(each) for each in (inputs[0], *outputs))

        for each in stage.modules():
            each.register_forward_hook(remember)

    run = Run(name, 4, wrap=watch, loss=loss)
    gc.collect()
    gc.disable()
    try:
        run.step()
        after = [sum(each() is not None for each in seen)]
        called = [calls]
        run.evaluate(3)
        after.append(sum(each() is not None for each in seen))
        called.append(calls)
    finally:
        gc.enable()
    return called, max(alive, default=0), after, len(seen)


@pytest.mark.parametrize("name", ["1f1b", "zbv", *map(full, SCHEDULES)])
def test_nothing_is_held_and_the_loss_runs_once_a_microbatch(pool, name):
    _, placement = scheduled(name, 2, 4)
    for rank, (called, alive, after, seen) in enumerate(pool.run(2, held, name)):
        assert called == ([4, 8] if rank == placement[-1] else [0, 0])
        assert alive == 0
        # Tokens are the caller's.
        assert seen >= 16
        assert after == [0, 0]
