"""Layouts that a model of another package does not allow; tests/cli/test_refusals.py has the lines of other layouts."""

import dataclasses

import pytest

from tests import tiny
from tests.prove.test_experts import MODELS
from titanlab.costs import Layout, ModelAccount
from titanlab.errors import ConfigError
from titanlab.parallelism import Parallelism
from titanlab.recipe.recipe_rules import check_context, check_pipeline, check_tensor
from titanlab.techniques.ac.recomputation_schema import SelectiveOp
from titanlab.techniques.schedule.published_schema import GPipe

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


def check(changes, **degrees):
    model, layout, config = dataclasses.replace(MODEL, **changes), Layout(**degrees), Parallelism(**degrees)
    check_context(layout, model, seq_len=16, kernel="auto")
    check_tensor(layout, config, model, seq_len=16, microbatch=1)
    check_pipeline(layout, config, model, GPipe(), microbatches=1)


@pytest.mark.parametrize(
    "degrees", [{}, {"tensor": 2}, {"tensor": 4}, {"tensor": 2, "shard": 2}, {"context": 2}, {"pipeline": 4}]
)
def test_a_layout_that_fits(degrees):
    check({}, **degrees)


@pytest.mark.parametrize(
    ("changes", "degrees", "complaint"),
    [
        (
            {"tensor_plan": {}},
            {"tensor": 2},
            "the model has no plan of how to cut its layers; try parallelism.tensor=1",
        ),
        (
            {"parameters": {"other.weight": (8, 8)}},
            {"tensor": 2},
            "the model's plan says nothing about other.weight; try parallelism.tensor=1, or name it in the model's",
        ),
        (
            {"parameters": {"layers.0.down.weight": (8, 6)}},
            {"tensor": 4},
            "must divide the 6 columns of layers.0.down.weight",
        ),
        ({}, {"tensor": 2, "shard": 3}, "parallelism.shard=3: with tensor=2, cannot cut the 10 rows of table.weight"),
        # The degrees that work are found without trying all smaller ones.
        (
            {},
            {"tensor": 2, "shard": 2_000_000_001},
            "nor its 8 columns into 2000000001; try parallelism.shard=4 or 8, or parallelism.tensor=1",
        ),
        ({"attention": ""}, {"context": 2}, "the model does not say where its attention is; try parallelism.context=1"),
        ({"pieces": ()}, {"pipeline": 2}, "the model does not say where it may be cut; try parallelism.pipeline=1"),
    ],
)
def test_a_layout_that_the_model_does_not_allow(changes, degrees, complaint):
    with pytest.raises(ConfigError) as refused:
        check(changes, **degrees)
    assert complaint in str(refused.value)


def test_experts_that_neither_they_nor_their_rows_divide(tmp_path):
    narrow = dataclasses.replace(MODELS["mixtral"], ffn_dim=45)
    with pytest.raises(ConfigError) as refused:
        tiny.recipe(tmp_path, model=narrow, expert=2, shard=4)
    rule = "leaves 3 experts to 2 shards of FSDP2, which do not divide them nor the 45 rows of"
    assert str(refused.value).startswith(f"parallelism.expert=2: {rule}")


@pytest.mark.parametrize("given", [{"ac": SelectiveOp()}, {"blocks": True}, {"blocks": True, "ac": SelectiveOp()}])
def test_blocks_are_compiled_and_checkpointed_with_experts(tmp_path, given):
    assert tiny.recipe(tmp_path, model=MODELS["qwen3"], shard=2, expert=2, **given).layout.expert == 2


def test_the_axis_of_experts_multiplies_nothing_and_has_its_name(tmp_path):
    made = tiny.recipe(tmp_path, model=MODELS["qwen3"], shard=2, tensor=2, expert=4)
    assert (made.world, made.layout.label, made.layout.expert_shard) == (4, "dp_s2·tp2·ep4", 1)
