"""The memory of each rank: items, moments, and what a technique takes away or adds."""

from __future__ import annotations

import dataclasses

import pytest

from tests.plan.recipes import SMALL, made
from titanlab.errors import ConfigError
from titanlab.plan import ITEMS, machine_of, most_memory
from titanlab.plan.memory import RankMemory, memory
from titanlab.plan.stages import model_facts
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing
from titanlab.techniques.schedule.published_schema import Interleaved1F1B, OneFOneB


def small(**given):
    return made(**{"model": SMALL, "batch": 32, "seq_len": 1024, "microbatch": 1, **given})


def parameters(recipe):
    return sum(rank.items["parameters"] for rank in memory(recipe))


def test_reserved_is_what_is_allocated_with_the_excess_and_the_process():
    rank = RankMemory(rank=0, moment="loss", items={"parameters": 100, "activations": 50})
    assert rank.allocated == 150
    machine = dataclasses.replace(machine_of(small()), allocator_excess=1.5, process_bytes=25.0)
    assert machine.reserved_bytes(rank.allocated) == 250


@pytest.mark.parametrize("degrees", [{}, {"shard": 4}, {"replicate": 2}, {"tensor": 2, "shard": 2}, {"pipeline": 2}])
def test_each_rank_of_a_pipeline_has_all_items(degrees):
    recipe = small(**degrees)
    found = memory(recipe)
    assert [rank.rank for rank in found] == list(range(recipe.layout.pipeline))
    for rank in found:
        assert tuple(rank.items) == ITEMS
        assert all(isinstance(size, int) and size >= 0 for size in rank.items.values())
        assert rank.moment in ("loss", "backward", "end", "optimizer")
    assert most_memory(recipe).allocated == max(rank.allocated for rank in found)


def test_parameters_are_exact_and_shared_out():
    account = model_facts(SMALL).account
    count = sum(_product(shape) for shape in account.parameters.values())
    assert parameters(small()) == 4 * count
    assert parameters(small(shard=4)) == pytest.approx(4 * count / 4, rel=1e-3)
    assert parameters(small(replicate=4)) == 4 * count
    assert parameters(small(pipeline=2)) == 4 * count


def _product(shape):
    size = 1
    for length in shape:
        size *= length
    return size


def test_recomputation_keeps_less_and_a_longer_sequence_more():
    kept = {ac.kind: most_memory(small(ac=ac)).items["activations"] for ac in (NoCheckpointing(), FullCheckpointing())}
    assert kept["full"] < kept["none"] / 3
    assert most_memory(small(seq_len=2048)).allocated > most_memory(small()).allocated


@pytest.mark.parametrize("degrees", [{}, {"replicate": 2}, {"shard": 4}])
def test_at_the_end_of_the_backward_pass_all_gradients_exist(degrees):
    """Beside what the backward pass of the first block needs, so that the optimizer's step needs less."""
    needed = most_memory(small(batch=4, microbatch=None, seq_len=16, **degrees))
    assert (needed.moment, needed.items["gradients"]) == ("end", needed.items["parameters"])


def test_offloaded_states_take_nothing_of_the_device():
    kept, offloaded = (most_memory(small(shard=2, cpu_offload=flag)) for flag in (False, True))
    assert {name: offloaded.items[name] for name in ("parameters", "gradients", "optimizer")} == {
        "parameters": 0, "gradients": 0, "optimizer": 0,
    }  # fmt: skip
    assert kept.items["parameters"] > 0


def test_the_first_rank_of_1f1b_keeps_most_activations():
    found = [rank.items["activations"] for rank in memory(small(pipeline=3, schedule=OneFOneB()))]
    assert found[0] > found[1] > found[2]


def test_ranks_of_several_stages_are_summed():
    recipe = small(pipeline=3, schedule=Interleaved1F1B(stages_per_rank=2))
    assert parameters(recipe) == parameters(small())
    assert len({rank.items["parameters"] for rank in memory(recipe)}) > 1


def test_a_pipeline_with_more_stages_than_pieces_is_refused():
    with pytest.raises(ConfigError) as caught:
        memory(small(pipeline=16, batch=64))
    assert "\n" not in str(caught.value)


def test_microbatches_do_not_change_what_one_rank_without_a_pipeline_keeps():
    recipe = small()
    more = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, global_batch=64))
    assert most_memory(recipe).items["activations"] == most_memory(more).items["activations"]
