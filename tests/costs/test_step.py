"""What formulas of communication read of a step: its tokens, its stages, and the names of its groups."""

from __future__ import annotations

import pytest

from titanlab.costs import Coordinate, Layout, Step
from titanlab.techniques.model.llama_schema import Llama

ACCOUNT = Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=192, vocab_size=256).account()


def step(layout=None, **given):
    return Step(account=ACCOUNT, layout=Layout(**(layout or {})), **{"seq_len": 32, "microbatch": 3, **given})


def test_ranks_of_the_context_axis_share_the_tokens():
    assert step().tokens == 96
    assert step({"context": 4}).tokens == 24
    # The tensor axis cuts them later, and only with sequence parallelism.
    assert step({"tensor": 2, "shard": 2}).tokens == 96


def test_a_piece_in_fp32_has_four_bytes_an_element():
    mixed = step(compute_bytes=2, fp32_parts=("output",))
    assert [mixed.element_bytes(piece) for piece in ("layers.0", "output")] == [2, 4]


def test_a_cpu_scatters_by_an_all_to_all():
    assert (step(accelerator="cpu").scatter, step().scatter) == ("all_to_all", "reduce_scatter")


@pytest.mark.parametrize(
    ("layout", "mixed", "by_ddp"),
    [
        ({"replicate": 2}, False, True),
        ({"replicate": 2}, True, False),
        ({"replicate": 2, "tensor": 2}, False, False),
        ({"shard": 2}, False, False),
        ({}, False, False),
    ],
)
def test_ddp_sums_gradients_of_replicas_alone(layout, mixed, by_ddp):
    assert step(layout, mixed=mixed).replicas_by_ddp is by_ddp


def test_a_rank_has_the_stages_that_are_placed_on_it():
    stages = [["tok_embeddings"], ["layers.0"], ["layers.1"], ["norm", "output"]]
    piped = step({"pipeline": 2}, stages=stages, placement=(0, 1, 1, 0))
    assert list(piped.stages_of(Coordinate(pipeline=0))) == [(0, ["tok_embeddings"]), (3, ["norm", "output"])]
    # Ranks of the other axes have the same stages.
    assert list(piped.stages_of(Coordinate(pipeline=1, tensor=1))) == [(1, ["layers.0"]), (2, ["layers.1"])]


def test_without_a_pipeline_one_stage_has_the_whole_model():
    assert list(step().stages_of(Coordinate(tensor=1))) == [(0, ACCOUNT.pieces)]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        # By axis of the formulas, the name in the table.
        ({}, {"world": "world", "fsdp": "shard", "tensor": "tensor"}),
        ({"shard": 2}, {"world": "shard", "fsdp": "shard"}),
        ({"tensor": 2}, {"world": "tensor", "tensor": "tensor", "fsdp": "shard"}),
        # Axes that share a dimension of the mesh have one name, unless one of them has all ranks.
        ({"context": 2}, {"world": "context", "fsdp": "context", "context": "context"}),
        ({"shard": 2, "context": 2}, {"world": "shard·context", "fsdp": "shard·context", "context": "context"}),
        ({"shard": 2, "tensor": 2}, {"world": "world", "fsdp": "shard", "tensor": "tensor"}),
        ({"replicate": 2, "shard": 2}, {"world": "world", "replicate": "replicate", "fsdp": "shard"}),
        ({"shard": 2, "tensor": 2, "expert": 4}, {"world": "expert", "expert": "expert", "tensor": "tensor"}),
        ({"shard": 4, "expert": 2}, {"world": "shard", "expert": "expert", "expert_shard": "expert_shard"}),
    ],
    ids=str,
)
def test_a_group_of_all_ranks_has_the_name_of_the_axis_with_all(layout, names):
    assert {name: step(layout).axis(name) for name in names} == names
