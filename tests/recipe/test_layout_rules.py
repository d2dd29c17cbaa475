"""What a layout asks of a model, a sequence and a schedule: one line for everything that does not fit."""

import dataclasses

import pytest

from titanlab.costs import Layout, ModelAccount
from titanlab.errors import ConfigError
from titanlab.parallelism import Parallelism
from titanlab.recipe.recipe_rules import (
    check_async_tensor,
    check_context,
    check_pipeline,
    check_symmetric_memory,
    check_tensor,
)
from titanlab.techniques.schedule.published_schema import GPipe, Interleaved1F1B

MODEL = ModelAccount(
    parameters={
        "table.weight": (10, 8),
        "layers.0.up.weight": (12, 8),
        "layers.0.down.weight": (8, 12),
        "layers.0.down.bias": (8,),
        "layers.0.norm.weight": (8,),
        "head.weight": (10, 8),
    },
    embedding="table.weight",
    tied={},
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=2,
    dim=8,
    vocab_size=10,
    pieces=("table", "layers.0", "head"),
    attention="attention",
    tensor_plan={
        "table": "embedding",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "layers.*.norm": "norm",
        "head": "head",
    },
)


def refusal(rule, *args, **given):
    with pytest.raises(ConfigError) as refused:
        rule(*args, **given)
    return str(refused.value)


def tensor(degree, model=MODEL, *, seq_len=16, **given):
    layout = Layout(tensor=degree, **{axis: given.pop(axis) for axis in ("shard", "context") if axis in given})
    return layout, Parallelism(**layout.degrees(), **given), model, {"seq_len": seq_len, "microbatch": 1}


@pytest.mark.parametrize("given", [(1, {}), (2, {}), (4, {}), (2, {"shard": 2})], ids=str)
def test_layers_that_can_be_cut(given):
    *args, sizes = tensor(given[0], **given[1])
    check_tensor(*args, **sizes)


@pytest.mark.parametrize(
    ("degree", "changes", "given", "complaint"),
    [
        (3, {}, {}, "parallelism.tensor=3: must divide 4 attention heads; try parallelism.tensor=2 or 4"),
        (4, {"kv_heads": 2}, {}, "must divide 2 key/value heads; try parallelism.tensor=1 or 2"),
        (4, {"parameters": {"layers.0.up.weight": (6, 8)}}, {}, "must divide the 6 rows of layers.0.up.weight"),
        (4, {"parameters": {"layers.0.down.weight": (8, 6)}}, {}, "must divide the 6 columns of layers.0.down.weight"),
        (4, {"parameters": {"head.weight": (3, 8)}}, {}, "leaves a process without a row of head.weight, which has 3"),
        (2, {"tensor_plan": {}}, {}, "the model has no plan of how to cut its layers; try parallelism.tensor=1"),
        (2, {"parameters": {"other.weight": (8, 8)}}, {}, "the model's plan says nothing about other.weight"),
        (4, {}, {"seq_len": 6}, "must divide the 6 tokens that a process has of a microbatch; try parallelism.tensor=1 or 2"),
        (2, {}, {"shard": 3}, "parallelism.shard=3: with tensor=2, cannot cut the 10 rows of table.weight into 6 equal"),
        # The degrees that work are found without trying all smaller ones.
        (2, {}, {"shard": 2_000_000_001}, "nor its 8 columns into 2000000001; try parallelism.shard=4 or 8, or parallelism"),
        (2, {}, {"context": 3, "seq_len": 12}, "parallelism.context=3: with tensor=2, cannot cut the 10 rows"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_cut(degree, changes, given, complaint):
    *args, sizes = tensor(degree, dataclasses.replace(MODEL, **changes), **given)
    assert complaint in refusal(check_tensor, *args, **sizes)


@pytest.mark.parametrize(
    ("changes", "seq_len", "kernel", "complaint"),
    [
        ({}, 12, "auto", ""),
        ({}, 10, "auto", "training.seq_len=10: must be a multiple of 4"),
        ({"attention": ""}, 12, "auto", "the model does not say where its attention is"),
        ({}, 12, "flash3", ""),
        ({}, 12, "math", "model.attention=math: "),
        ({}, 12, "flash_attn", "model.attention=flash_attn: "),
    ],
)
def test_sequences_that_can_be_shared(changes, seq_len, kernel, complaint):
    model = dataclasses.replace(MODEL, **changes)
    check_context(Layout(), model, seq_len=seq_len, kernel=kernel)
    if complaint:
        assert complaint in refusal(check_context, Layout(context=2), model, seq_len=seq_len, kernel=kernel)
    else:
        check_context(Layout(context=2), model, seq_len=seq_len, kernel=kernel)


@pytest.mark.parametrize(
    ("degree", "schedule", "changes", "microbatches", "complaint"),
    [
        (4, GPipe(), {}, 1, ""),
        (2, Interleaved1F1B(), {}, 4, ""),
        (5, GPipe(), {}, 1, "parallelism.pipeline=5: gpipe makes 5 stages of it, more than the 4 blocks"),
        (4, Interleaved1F1B(), {}, 4, "interleaved_1f1b makes 8 stages of it, more than the 4 blocks"),
        (2, GPipe(), {"pieces": ()}, 1, "the model does not say where it may be cut"),
        (2, GPipe(), {"tied": {"head.weight": "table.weight"}}, 1, "the head is the embedding's table"),
        (2, GPipe(), {}, 600_000, "makes 600,000 microbatches of a step, in 2 stages"),
    ],
)
def test_pipelines_that_fit(degree, schedule, changes, microbatches, complaint):
    model, config = dataclasses.replace(MODEL, **changes), Parallelism(pipeline=degree)
    args = Layout(pipeline=degree), config, model, schedule
    if complaint:
        assert complaint in refusal(check_pipeline, *args, microbatches=microbatches)
    else:
        check_pipeline(*args, microbatches=microbatches)


def test_a_split_needs_a_pipeline():
    config = Parallelism(split=[1, 3])
    assert "parallelism.split=[1,3]" in refusal(check_pipeline, Layout(), config, MODEL, GPipe(), microbatches=1)


@pytest.mark.parametrize(
    ("tensor", "given", "accelerator", "compiled", "complaint"),
    [
        (2, {}, "cuda", "inductor", ""),
        (1, {}, "cuda", "inductor", "and tensor=1"),
        (2, {}, "cpu", "inductor", "runs on a CPU"),
        (2, {}, "cpu", False, "runs on a CPU"),
        (2, {"sequence_parallel": False}, "cuda", "inductor", "sequence_parallel=false has none"),
        (2, {}, "cuda", "aot_eager", "is done by inductor, and aot_eager compiles the blocks; try compile.backend="),
        (2, {}, "cuda", False, "is done by inductor, and the blocks are not compiled; try compile=block"),
    ],
)
def test_where_async_tensor_works(tensor, given, accelerator, compiled, complaint):
    layout, config = Layout(tensor=tensor), Parallelism(tensor=tensor, async_tensor=True, **given)
    values = {"accelerator": accelerator, "compiled": compiled}
    if complaint:
        assert complaint in refusal(check_async_tensor, layout, config, **values)
    else:
        check_async_tensor(layout, config, **values)


@pytest.mark.parametrize(
    ("degrees", "given", "accelerator", "complaint"),
    [
        ({"shard": 2}, {}, "cuda", ""),
        ({"context": 2}, {}, "cuda", ""),
        ({"replicate": 2}, {}, "cuda", "and nothing is sharded"),
        ({"shard": 2}, {}, "cpu", "this runs on a CPU"),
        ({"shard": 2}, {"cpu_offload": True}, "cuda", "parameters in host memory"),
        ({"shard": 2, "tensor": 2}, {"async_tensor": True}, "cuda", "AsyncTP needs that of CUDA"),
    ],
)
def test_where_symmetric_memory_works(degrees, given, accelerator, complaint):
    layout, config = Layout(**degrees), Parallelism(**degrees, symmetric_memory=True, **given)
    if complaint:
        found = refusal(check_symmetric_memory, layout, config, accelerator=accelerator)
        assert found.startswith("parallelism.symmetric_memory=true: ")
        assert complaint in found
    else:
        check_symmetric_memory(layout, config, accelerator=accelerator)
