"""Pipelines compute what one process computes, whatever the schedule."""

import collections
import gc
import weakref
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from tests.cover import cover, marks
from tests.parallelism.pipeline_run import (
    SCHEDULES,
    TOLERANCE,
    Run,
    alone,
    batch,
    full,
    model,
    scheduled,
    shard,
    total,
)
from tests.pool import RankFailure
from titanlab.parallelism import loss_sum


def equal_to_alone(name, counts, *given):
    """Errors of gradients and losses, by microbatches, with evaluations before, between and after steps."""
    wrap, data = given or (None, 1)
    found = []
    for microbatches in counts:
        run = Run(name, microbatches, data=data, wrap=wrap and shard(*wrap))
        _, expected = alone(run.all_rows)
        for rows in (run.rows, 1):
            full = total(run.evaluate(run.rows).clone())
            with torch.no_grad():
                tokens, labels = (each[:rows] for each in run.local())
                part_expected = loss_sum(model()(tokens, run.positions), labels).item()
            part = run.evaluate(rows).item()
            holds = run.placement[-1] == dist.get_rank() // data
            step = total(run.step())
            found.append(
                (
                    run.worst(),
                    abs(step / expected - 1),
                    abs(full / expected - 1),
                    abs(part / part_expected - 1) if holds else abs(part),
                )
            )
    return found


# In `make test`: one backward and a split one, and what only a list by hand does.
QUICK = ("1f1b", "zbv", "by_hand")


@pytest.mark.parametrize("name", [name if name in QUICK else full(name) for name in (*SCHEDULES, "by_hand")])
def test_every_schedule_computes_what_one_process_computes(pool, name):
    counts = (3,) if name == "by_hand" else SCHEDULES[name][1]
    for found in pool.run(2, equal_to_alone, name, counts):
        assert len(found) == 2 * len(counts)
        assert all(max(errors) < TOLERANCE for errors in found), found


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_four_ranks(pool, name):
    for found in pool.run(4, equal_to_alone, name, (8,)):
        assert all(max(errors) < TOLERANCE for errors in found), found


BOTH = ("replicate", "shard")
SHARDS_ALWAYS = [
    # torch's own way of splitting a backward is wrong with this, without a word.
    ("zbv", True, "replicate"),
]
SHARDS = list(product(SCHEDULES, (False, True), ("replicate", BOTH)))
SHARDS_COVERING = cover(SHARDS, lambda row: row, always=SHARDS_ALWAYS, cost=lambda row: 1)


@pytest.mark.parametrize(
    ("name", "reshard", "axis"),
    [pytest.param(*row, marks=marks(row, always=SHARDS_ALWAYS, covering=SHARDS_COVERING)) for row in SHARDS],
)
def test_shards_in_a_pipeline(pool, name, reshard, axis):
    for found in pool.run(4, equal_to_alone, name, (4,), (reshard, None, axis), 2):
        assert all(max(errors) < TOLERANCE for errors in found), found


def misused():
    run = Run("1f1b", 2)
    rows = batch(5)
    for call, message in (
        (run.pipeline.forward_backward, "5 sequences for 2 microbatches of 2 each"),
        (run.pipeline.evaluate, "5 sequences are more than the 4 of a step"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*rows, run.positions)


def half_sharded():
    def wrap(stage, mesh):
        for block in stage.layers.values():
            fully_shard(block, mesh=mesh["replicate"])

    with pytest.raises(ValueError, match="its gradients would never be reduced"):
        Run("1f1b", 2, wrap=wrap)


def test_what_does_not_fit_is_refused(pool):
    for call in (misused, half_sharded):
        pool.run(2, call)


# What stages send, and how long they hold what


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
