"""Pipelines compute what one process computes, whatever the schedule."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.cover import cover, marks
from tests.parallelism.pipeline_run import (
    DIM,
    MICROBATCH,
    SCHEDULES,
    SEQ,
    TOLERANCE,
    Run,
    alone,
    batch,
    full,
    model,
    shard,
    total,
)
from titanlab.parallelism import Pipeline, loss_sum, of_logits


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
    run.placement.reverse()
    with pytest.raises(ValueError, match=r"was given stages \[[01]\] of the placement \[1, 0\]"):
        Pipeline(
            run.stages,
            actions=run.actions,
            placement=run.placement,
            group=dist.group.WORLD,
            device=torch.device("cpu"),
            loss=of_logits(loss_sum),
            scale=1.0,
            hidden_shape=(MICROBATCH, SEQ, DIM),
            hidden_dtype=torch.float32,
        )


def half_sharded():
    def wrap(stage, mesh):
        for block in stage.layers.values():
            fully_shard(block, mesh=mesh["replicate"])

    with pytest.raises(ValueError, match="its gradients would never be reduced"):
        Run("1f1b", 2, wrap=wrap)


def test_what_does_not_fit_is_refused(pool):
    for call in (misused, half_sharded):
        pool.run(2, call)
