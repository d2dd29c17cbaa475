"""What is changed of a recipe before it is traced, and which ranks stand for the others."""

from __future__ import annotations

import dataclasses

import pytest

from tests import tiny
from titanlab.cli.compose import compose_one
from titanlab.data import Synthetic
from titanlab.errors import ConfigError
from titanlab.plan import for_planning
from titanlab.prove import trace
from titanlab.prove.traced_step import different_ranks, for_tracing
from titanlab.recipe import check_all_but_data, read_flags


def shipped(*arguments):
    return for_planning(compose_one(read_flags(arguments))[1], stands=True)


def test_a_gpus_recipe_becomes_one_that_a_cpu_runs_in_eager_mode():
    asked = shipped("+recipe=llama3_1_405b_512gpus", "cluster=h100")
    made, notes = for_tracing(asked)
    check_all_but_data(made)
    assert not made.compile.compiles
    assert not made.parallelism.async_tensor
    assert (made.precision.emulate, made.layout, made.microbatches) == ("true", asked.layout, 2)
    assert made.microbatch == asked.microbatch
    assert notes == (
        "attention and norms are those of a CPU, and so is what they keep",
        "compile=block+loss is traced in eager mode",
        "AsyncTP communicates the same bytes in pieces: traced as one collective each",
        "2 of 32 microbatches are traced, and the declarations are of such a step",
    )


def test_a_small_recipe_stays_as_it_is(tmp_path):
    made = tiny.recipe(tmp_path, shard=2, microbatch=3)
    assert for_tracing(made) == (made, ())


def test_document_masks_are_not_traced(tmp_path):
    made = tiny.recipe(tmp_path, data=Synthetic(vocab_size=256, document_mask=True))
    assert for_tracing(made) == (made, ("data.document_mask=true: attention is traced over whole sequences",))


def test_what_the_compiler_keeps_is_not_traced(tmp_path):
    asked = shipped("+recipe=llama3_1_8b_8gpus", "cluster=h100", "ac=memory_budget")
    made, notes = for_tracing(asked)
    assert made.ac.kind == "none"
    assert "ac=memory_budget is the compiler's: blocks keep all activations in the trace" in notes


def test_ddp_cannot_be_traced(tmp_path):
    with pytest.raises(ConfigError, match="DDP"):
        for_tracing(tiny.recipe(tmp_path, replicate=2))
    for_tracing(tiny.recipe(tmp_path, replicate=2, bf16=True))


def test_offloading_to_a_host_cannot_be_traced_for_a_gpu():
    asked = shipped("+recipe=llama3_1_8b_8gpus", "cluster=h100", "parallelism.cpu_offload=true")
    with pytest.raises(ConfigError, match="cpu_offload"):
        for_tracing(asked)


def test_ranks_with_the_same_declarations_are_traced_once(tmp_path):
    made = tiny.recipe(tmp_path, pipeline=4, shard=2, layers=8, global_batch=16)
    chosen, notes = different_ranks(made)
    # The first stage has the embedding, and the last one the head.
    assert chosen[0] == 0
    assert chosen[-1] == 6
    assert {0, 2, 4, 6} == {
        *chosen,
        *(4 for note in notes if note == "rank 2 stands for 4, whose declarations are the same"),
    }


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there_is_named(tmp_path, rank):
    with pytest.raises(ConfigError) as caught:
        trace(tiny.recipe(tmp_path, shard=2), [0, rank])
    assert (caught.value.key, caught.value.value) == ("--rank", rank)


def test_a_recipe_that_breaks_a_rule_is_not_traced(tmp_path):
    made = tiny.recipe(tmp_path, shard=2)
    broken = dataclasses.replace(made, training=dataclasses.replace(made.training, global_batch=3))
    with pytest.raises(ConfigError, match="global_batch"):
        trace(broken)


@pytest.mark.full
def test_ranks_are_traced_in_processes_of_their_own(tmp_path):
    made = tiny.recipe(tmp_path, pipeline=2, tensor=2)
    found = trace(made)
    assert [traced.rank for _, traced in found.pairs] == [0, 2]
    assert found.differing == []
