"""What ranks declare of a step, what is changed of a recipe before it is traced, and how the two are compared."""

import dataclasses

import pytest

from tests import tiny
from titanlab.cli.compose import compose_one
from titanlab.costs import TrafficRow
from titanlab.data import Synthetic
from titanlab.errors import ConfigError
from titanlab.plan import for_planning
from titanlab.prove import TraceComparison, comparison_rows, comparison_values, trace
from titanlab.prove.declared import RankAccount, declared
from titanlab.prove.traced_step import different_ranks, for_tracing
from titanlab.recipe import check_all_but_data, read_flags
from titanlab.techniques.precision.cast_schema import Bf16


def test_a_part_in_32_bits_keeps_twice_as_much(tmp_path):
    made = tiny.recipe(tmp_path, shard=2, precision=Bf16(fp32_parts=["layers.1"]))
    saved = declared(made, 0).saved
    assert saved[0] < saved[1] < 2 * saved[0]


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
        "attention and norms are traced with CPU kernels, and keep what those keep",
        "compile=block+loss is traced in eager mode",
        "AsyncTP communicates the same bytes in pieces: traced as one collective each",
        "2 of 32 microbatches are traced, and the declarations are of such a step",
    )


def test_what_the_compiler_keeps_is_not_traced():
    made, notes = for_tracing(shipped("+recipe=llama3_1_8b_8gpus", "cluster=h100", "ac=memory_budget"))
    assert made.ac.kind == "none"
    assert "ac=memory_budget is the work of a compiler: blocks keep all activations in the trace" in notes


def test_a_small_recipe_stays_as_it_is(tmp_path):
    made = tiny.recipe(tmp_path, shard=2, microbatch=3)
    assert for_tracing(made) == (made, ())
    made = tiny.recipe(tmp_path, data=Synthetic(vocab_size=256, document_mask=True))
    assert for_tracing(made) == (made, ("data.document_mask=true: attention is traced over whole sequences",))


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


GATHER = TrafficRow(axis="shard", kind="all_gather", count=2, bytes=64, wire_bytes=32)
DECLARED = RankAccount(
    rank=3, parameters=10, parameter_bytes=40, optimizer_bytes=80, saved={0: 5, 1: 5, 2: 7, 4: 7}, traffic=(GATHER,)
)


def compared(recipe=None, **changed):
    traced = dataclasses.replace(DECLARED, **changed)
    return TraceComparison(recipe=recipe, notes=(), pairs=((DECLARED, traced),))


def test_equal_accounts_have_no_difference():
    found = compared()
    assert found.differing == []
    assert [item.name for item in found.items] == [
        "parameters of its stages",
        "parameter bytes",
        "optimizer bytes",
        "each of blocks 0 to 1: saved bytes",
        "block 2: saved bytes",
        "block 4: saved bytes",
        "shard all_gather count",
        "shard all_gather bytes",
    ]


def test_every_figure_can_differ():
    other = TrafficRow(axis="tensor", kind="all_reduce", count=1, bytes=8, wire_bytes=8)
    found = compared(
        parameters=11, parameter_bytes=44, optimizer_bytes=0, saved={0: 5, 1: 6, 2: 7}, traffic=(GATHER, other)
    )
    assert {item.name: (item.declared, item.traced) for item in found.differing} == {
        "parameters of its stages": (10, 11),
        "parameter bytes": (40, 44),
        "optimizer bytes": (80, 0),
        "block 1: saved bytes": (5, 6),
        "block 4: saved bytes": (7, 0),
        "tensor all_reduce count": (0, 1),
        "tensor all_reduce bytes": (0, 8),
    }
    fewer = dataclasses.replace(GATHER, count=1, bytes=32)
    assert [item.difference for item in compared(traffic=(fewer,)).differing] == [-1, -32]


def test_rows_are_text():
    rows = comparison_rows(compared(parameter_bytes=4000).items)
    assert rows[0] == ["3", "parameters of its stages", "10", "10", "0"]
    assert rows[1] == ["3", "parameter bytes", "40", "4,000", "+3,960"]


def test_values_are_plain(tmp_path):
    values = comparison_values(compared(tiny.recipe(tmp_path), parameters=11))
    assert values["equal"] is False
    assert values["items"][0] == {
        "rank": 3, "name": "parameters of its stages", "declared": 10, "traced": 11, "difference": 1
    }  # fmt: skip
    assert values["optimizer_traffic"] == {"3": []}
