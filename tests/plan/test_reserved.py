"""What a rank takes from its device: tensors with the allocator's excess, the process, and what messages leave."""

import dataclasses

import pytest

from tests.plan.recipes import SMALL, made
from titanlab.plan import machine_of, most_memory, reserved_bytes
from titanlab.plan.memory import exchanged_bytes
from titanlab.recipe import Cluster

CPU = Cluster(
    accelerator="cpu", device="cpu", process_gb=0.4, allocator_excess=1.5, message_excess=2.0, memory_gb_per_second=9.0
)


def on_cpu(**given):
    return dataclasses.replace(made(model=SMALL, seq_len=128, **given), cluster=CPU)


def reserved(recipe):
    return reserved_bytes(recipe, machine_of(recipe), most_memory(recipe))


def test_one_process_has_no_messages():
    recipe = on_cpu()
    assert reserved(recipe) == round(1.5 * most_memory(recipe).allocated + 0.4e9)


def test_messages_of_a_microbatch_count():
    recipe = on_cpu(shard=2)
    assert exchanged_bytes(recipe, 0) > 3 * 2 * recipe.model.account().parameter_count
    own = 1.5 * most_memory(recipe).allocated + 0.4e9
    assert reserved(recipe) == pytest.approx(own + 2.0 * exchanged_bytes(recipe, 0), abs=2)
    # A pipeline sends more in a step with more microbatches, and as much in each of them.
    few, many = (on_cpu(pipeline=2, batch=batch, microbatch=1) for batch in (8, 16))
    assert exchanged_bytes(few, 0) == pytest.approx(exchanged_bytes(many, 0), rel=0.01)


def test_on_a_gpu_only_the_allocator_counts():
    recipe = made(shard=8)
    machine = machine_of(recipe)
    assert reserved(recipe) == round(most_memory(recipe).allocated * machine.allocator_excess)
    assert (machine.process_bytes, machine.message_excess) == (0.0, 0.0)
