"""Communication of blocks and edges as seconds on a machine."""

import dataclasses

import pytest

from tests.plan.recipes import SMALL, made
from titanlab.costs import Layout, TrafficRow
from titanlab.plan import machine_of
from titanlab.plan.block_time import context_rows, exchange_rows, seconds_of, tensor_rows
from titanlab.plan.machine import AxisPlacement, axis_of, expert_axis
from titanlab.plan.step_time import sharding_of
from titanlab.recipe import step_of


def recipe(**given):
    return made(model=SMALL, seq_len=64, batch=8, **given)


MACHINE = machine_of(recipe())
PAIR = AxisPlacement(ranks=2, in_node=2, nodes=1)
FOUR = AxisPlacement(ranks=4, in_node=4, nodes=1)


def row(kind, *, count=3, wire_bytes=6000, axis="tensor"):
    return TrafficRow(axis=axis, kind=kind, count=count, bytes=1, wire_bytes=wire_bytes)


def test_no_communication_takes_no_time():
    assert seconds_of([], PAIR, MACHINE) == 0.0
    assert seconds_of([row("all_gather")], AxisPlacement(ranks=1, in_node=1, nodes=1), MACHINE) == 0.0
    assert seconds_of([row("all_gather", count=0)], PAIR, MACHINE) == 0.0


def test_a_message_counts_where_it_is_sent():
    assert seconds_of([row("recv")], PAIR, MACHINE) == 0.0
    sent = seconds_of([row("send")], FOUR, MACHINE)
    assert sent == MACHINE.collective_seconds(FOUR, 6000, count=3, hops=1)
    assert seconds_of([row("send"), row("recv")], FOUR, MACHINE) == sent


def test_an_all_reduce_goes_around_the_ring_twice():
    gather, total = (seconds_of([row(kind)], FOUR, MACHINE) for kind in ("all_gather", "all_reduce"))
    assert gather == MACHINE.collective_seconds(FOUR, 6000, count=3, hops=3)
    assert total == MACHINE.collective_seconds(FOUR, 6000, count=3, hops=6)
    assert total > gather


def test_times_of_several_kinds_are_added():
    rows = [row("all_gather"), row("all_reduce", count=1), row("reduce_scatter")]
    assert seconds_of(rows, FOUR, MACHINE) == pytest.approx(sum(seconds_of([each], FOUR, MACHINE) for each in rows))


def test_sharding_of_a_block():
    step = step_of(recipe(shard=2))
    found = sharding_of(step, ("layers.0",), MACHINE)
    # Each once: gathered in two bytes, summed in four.
    assert found.gathered_bytes == 2 * found.elements
    assert found.scattered_bytes == 4 * found.elements
    assert found.gather > 0
    assert found.scatter > 0
    assert found.replicas == 0.0


def test_sharding_without_a_rank_to_share_with_takes_no_time():
    found = sharding_of(step_of(recipe()), ("layers.0",), MACHINE)
    assert (found.gather, found.scatter, found.replicas) == (0.0, 0.0, 0.0)


def test_replicas_of_shards_are_summed_too():
    found = sharding_of(step_of(recipe(shard=2, replicate=2)), ("layers.0",), MACHINE)
    assert found.replicas > 0


def test_tensor_parallelism_has_messages_of_microbatches_and_of_steps():
    step = step_of(recipe(tensor=2))
    microbatch, once = tensor_rows(step, "layers.0")
    assert {each.kind: each.count for each in microbatch} == {"all_gather": 4, "reduce_scatter": 4}
    # The weights of norms are whole on each rank.
    assert [(each.kind, each.count) for each in once] == [("all_reduce", 1)]
    assert tensor_rows(step_of(recipe()), "layers.0") == ([], [])


def test_context_parallelism_sends_keys_and_values():
    rows = context_rows(step_of(recipe(context=2)), "layers.0")
    assert {each.kind for each in rows} == {"send", "recv"}
    assert {each.axis for each in rows} == {"context"}
    assert context_rows(step_of(recipe()), "layers.0") == []


def test_a_block_without_experts_exchanges_no_tokens():
    assert exchange_rows(step_of(recipe(shard=2)), "layers.0") == []


@pytest.mark.parametrize(
    ("expert", "shards", "per_node", "own", "shared"),
    [
        (1, 8, 8, AxisPlacement(ranks=1, in_node=1, nodes=1), AxisPlacement(ranks=8, in_node=8, nodes=1)),
        (4, 8, 8, AxisPlacement(ranks=4, in_node=4, nodes=1), AxisPlacement(ranks=2, in_node=2, nodes=1)),
        (4, 16, 8, AxisPlacement(ranks=4, in_node=4, nodes=1), AxisPlacement(ranks=4, in_node=2, nodes=2)),
        (16, 16, 8, AxisPlacement(ranks=16, in_node=8, nodes=2), AxisPlacement(ranks=1, in_node=1, nodes=1)),
        (16, 32, 8, AxisPlacement(ranks=16, in_node=8, nodes=2), AxisPlacement(ranks=2, in_node=1, nodes=2)),
    ],
)
def test_ranks_that_share_experts_are_neighbours(expert, shards, per_node, own, shared):
    layout = Layout(shard=shards, expert=expert)
    assert expert_axis(layout, "expert", per_node) == own
    assert expert_axis(layout, "expert_shard", per_node) == shared


def test_an_axis_is_looked_up_once():
    layout = Layout(shard=4, tensor=2)
    assert axis_of(layout, "tensor", 8) == AxisPlacement(ranks=2, in_node=2, nodes=1)
    assert axis_of(layout, "tensor", 8) is axis_of(dataclasses.replace(layout), "tensor", 8)
