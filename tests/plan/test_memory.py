"""The memory of each rank: items, moments, what a technique takes away or adds, and what the device gives for it."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest

from tests import tiny
from tests.plan.kept import allocated_at
from tests.plan.recipes import SMALL, made
from titanlab.errors import ConfigError
from titanlab.plan import ITEMS, machine_of, most_memory, reserved_bytes, share_of
from titanlab.plan.memory import exchanged_bytes, memory, saved_bytes, stored_pieces
from titanlab.recipe import Cluster
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing, SelectiveOp
from titanlab.techniques.precision.cast_schema import Bf16, Fp32
from titanlab.techniques.schedule.published_schema import Interleaved1F1B, OneFOneB

COUNT = SMALL.account().parameter_count


def small(**given):
    return made(**{"model": SMALL, "batch": 32, "seq_len": 1024, "microbatch": 1, **given})


def parameters(recipe):
    return sum(rank.items["parameters"] for rank in memory(recipe))


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
    assert parameters(small()) == 4 * COUNT
    assert parameters(small(shard=4)) == pytest.approx(4 * COUNT / 4, rel=1e-3)
    assert parameters(small(replicate=4)) == 4 * COUNT
    assert parameters(small(pipeline=2)) == 4 * COUNT
    # Two averages, and a count of updates for each tensor.
    (rank,) = memory(small())
    assert rank.items["optimizer"] == 8 * COUNT + 4 * len(SMALL.account().parameters)


def test_what_is_gathered_has_the_width_of_the_precision():
    kept = {"shard": 8, "reshard_after_forward": "never"}
    widths = [most_memory(small(**kept, precision=own)).items["gathered parameters"] for own in (None, Fp32())]
    assert [width // COUNT for width in widths] == [2, 4]


def test_recomputation_keeps_less_and_a_longer_sequence_more():
    kept = {ac.kind: most_memory(small(ac=ac)).items["activations"] for ac in (NoCheckpointing(), FullCheckpointing())}
    assert kept["full"] < kept["none"] / 3
    assert most_memory(small(seq_len=2048)).allocated > most_memory(small()).allocated
    # Without a pipeline, more microbatches keep as much.
    assert most_memory(small(batch=64)).items["activations"] == kept["none"]


def test_compiled_blocks_keep_no_result_that_is_computed_again_or_not_needed():
    """As on an H200 (benchmarks/results/gpu_session_h200): 63.86 GB allocated, and without this rule 65.7 estimated."""
    tokens, blocks = 1024, SMALL.layers
    for ac, columns in ((NoCheckpointing(), SMALL.ffn_dim), (SelectiveOp(), SMALL.dim), (FullCheckpointing(), 0)):
        eager, compiled = (
            saved_bytes(ac, SMALL, share_of(small()), 1, tokens, compiled=compiled) for compiled in (False, True)
        )
        assert eager - compiled == 2 * blocks * tokens * columns, ac.kind


def test_whole_logits_of_tensor_parallelism_exist_twice():
    """As ranks gather them, and in the order of the vocabulary."""
    given = {"seq_len": 4096, "batch": 1, "loss_parallel": False}
    alone, two = (most_memory(small(**given, tensor=ranks)).items["logits and loss"] for ranks in (1, 2))
    assert two - alone == 2 * 4096 * 2048


@pytest.mark.parametrize("degrees", [{}, {"replicate": 2}, {"shard": 4}])
def test_at_the_end_of_the_backward_pass_all_gradients_exist(degrees):
    """Beside what the backward pass of the first block needs, so that the optimizer's step needs less."""
    needed = most_memory(small(batch=4, microbatch=None, seq_len=16, **degrees))
    assert (needed.moment, needed.items["gradients"]) == ("end", needed.items["parameters"])


FSDP = {"dim": 128, "layers": 8, "heads": 8, "kv_heads": 4, "ffn_dim": 448, "global_batch": 16, "microbatch": 1}


LAYOUTS = [
    {"shard": 4, "bf16": True},
    {"replicate": 2, "shard": 2},
    {"replicate": 2, "shard": 2, "precision": Bf16(reduce="bf16")},
    {"shard": 2, "context": 2, "tensor": 2, "bf16": True, "reshard_after_forward": "never"},
]


DEFAULT = ((2, "last"), (1, "each"))


# In `make test`, one layout for each choice; the others are many times as slow.
@pytest.mark.parametrize(
    ("given", "choice"),
    [
        pytest.param(given, choice, marks=[] if (place, choice) in DEFAULT else [pytest.mark.full])
        for place, given in enumerate(LAYOUTS)
        for choice in ("last", "each")
    ],
    ids=str,
)
def test_between_microbatches_a_rank_keeps_the_gradients_of_the_plan(tmp_path, given, choice):
    recipe = tiny.recipe(tmp_path, **FSDP, **given, reduce_gradients=choice)
    layout, reshards = recipe.layout, recipe.parallelism.frees_after_forward
    pieces = stored_pieces(recipe.model, recipe.precision, recipe.optimizer, layout.tensor, layout.fsdp)
    # FSDP2 keeps gathered what the backward begins with.
    gathered = [own.gathered for name, own in pieces.items() if not (reshards and name.startswith("layers."))]
    gathered += [pieces["layers.7"].gathered] * reshards
    with patch("titanlab.plan.memory._loss", lambda *given: 10**9):
        (rank,) = memory(recipe)
    assert rank.moment == "loss"
    planned = rank.items["gradients"] + rank.items["unreduced gradients"]
    # Beside them are losses, positions and stores of no more than a few kB.
    assert 0 <= allocated_at(recipe, "forward")[-1] - sum(gathered) - planned < 4096


def test_each_microbatch_reduces_where_whole_gradients_are_large():
    eight = {"shard": 8, "batch": 64, "microbatch": 1}
    assert made(**eight).reduces_each
    assert not small(**eight).reduces_each
    assert small(**eight, reduce_gradients="each").reduces_each
    assert not made(**eight, reduce_gradients="last").reduces_each
    # With one microbatch or one shard there is nothing to save, and a pipeline needs small microbatches.
    assert not made(shard=8, batch=64).reduces_each
    assert not made(replicate=8, batch=64, microbatch=1).reduces_each
    assert not made(pipeline=2, shard=4, batch=64).reduces_each
    # Tensor parallelism cuts gradients too: 8.03e9 parameters in float32 by 8 are less than 4 GiB.
    assert made(shard=4, tensor=4, batch=64, microbatch=1).reduces_each
    assert not made(shard=2, tensor=8, batch=64, microbatch=1).reduces_each
    kept = {choice: most_memory(made(**eight, reduce_gradients=choice)).allocated for choice in ("last", "each")}
    # 32 GB, without the shard of 4 GB and the gradients of two blocks, the embedding and the head.
    assert kept["last"] - kept["each"] > 20e9


def test_offloaded_states_take_nothing_of_the_device():
    kept, offloaded = (most_memory(small(shard=2, cpu_offload=flag)) for flag in (False, True))
    states = ("parameters", "gradients", "optimizer")
    assert {name: offloaded.items[name] for name in states} == dict.fromkeys(states, 0)
    assert kept.items["parameters"] > 0


def test_ranks_of_a_pipeline_keep_what_their_stages_do():
    found = [rank.items["activations"] for rank in memory(small(pipeline=3, schedule=OneFOneB()))]
    assert found[0] > found[1] > found[2]
    recipe = small(pipeline=3, schedule=Interleaved1F1B(stages_per_rank=2))
    assert parameters(recipe) == parameters(small())
    assert len({rank.items["parameters"] for rank in memory(recipe)}) > 1
    with pytest.raises(ConfigError) as caught:
        memory(small(pipeline=16, batch=64))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reshard", ["auto", "never"])
def test_buffers_of_symmetric_memory_count_at_every_moment(reshard):
    """They are a pool of their own, which lends nothing to other tensors."""
    given = {"batch": 64, "shard": 8, "seq_len": 512, "microbatch": None, "reshard_after_forward": reshard}
    plain, found = (most_memory(small(**given, symmetric_memory=flag)) for flag in (False, True))
    names = "communication buffers"
    assert found.allocated - plain.allocated == found.items[names] - plain.items[names] > 0
    dim, ffn, vocabulary, kv = 256, 768, 2048, 128
    block = 2 * (2 * dim * dim + 2 * dim * kv + 3 * dim * ffn + 2 * dim)
    edges = 2 * (2 * vocabulary * dim + dim)
    in_backward = plain.moment in ("backward", "end")
    assert plain.moment == found.moment
    assert plain.items[names] == (block if in_backward and reshard != "never" else 0)
    assert found.items[names] == 2 * block + edges + (0 if in_backward else 2 * edges)


CPU = Cluster(
    accelerator="cpu", device="cpu", process_gb=0.4, allocator_excess=1.5, message_excess=2.0, memory_gb_per_second=9.0
)


def on_cpu(**given):
    return dataclasses.replace(made(model=SMALL, seq_len=128, **given), cluster=CPU)


def reserved(recipe):
    return reserved_bytes(recipe, machine_of(recipe), most_memory(recipe))


def test_the_allocator_the_process_and_messages_take_more_than_the_tensors():
    alone, pair = on_cpu(), on_cpu(shard=2)
    assert reserved(alone) == round(1.5 * most_memory(alone).allocated + 0.4e9)
    assert exchanged_bytes(pair, 0) > 3 * 2 * COUNT
    own = 1.5 * most_memory(pair).allocated + 0.4e9
    assert reserved(pair) == pytest.approx(own + 2.0 * exchanged_bytes(pair, 0), abs=2)
    # A pipeline sends more in a step with more microbatches, and as much in each of them.
    few, many = (on_cpu(pipeline=2, batch=batch, microbatch=1) for batch in (8, 16))
    assert exchanged_bytes(few, 0) == pytest.approx(exchanged_bytes(many, 0), rel=0.01)
    # On a GPU only the allocator counts.
    recipe = made(shard=8)
    assert reserved(recipe) == round(most_memory(recipe).allocated * machine_of(recipe).allocator_excess)
