"""The rules of expert parallelism, each in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import tiny
from tests.prove.test_experts import MODELS
from titanlab.errors import ConfigError
from titanlab.techniques.ac.recomputation_schema import SelectiveOp

QWEN = MODELS["qwen3"]
NARROW = replace(MODELS["mixtral"], ffn_dim=45)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"expert": 0}, "parallelism.expert=0: a degree is at least 1"),
        (
            {"expert": -1, "shard": 2},
            "parallelism.expert=-1: a degree is at least 1, and that of experts does not follow",
        ),
        ({"expert": 2}, "parallelism.expert=2: must divide the 1 processes of shard · context · tensor; try"),
        ({"expert": 4, "shard": 6, "global_batch": 12}, "must divide the 6 processes of shard · context · tensor; try"),
        ({"expert": 3, "shard": 3}, "parallelism.expert=3: must divide the 8 experts; try parallelism.expert=1"),
        ({"expert": 2, "shard": 2, "model": None}, "parallelism.expert=2: the model has no experts"),
        (
            {"expert": 2, "tensor": 2, "sequence_parallel": False},
            "parallelism.expert=2: needs tokens that are divided among the processes of the tensor axis",
        ),
        (
            {"expert": 2, "shard": 4, "model": NARROW},
            "parallelism.expert=2: leaves 3 experts to 2 shards of FSDP2, which do not divide them nor the 45 rows of",
        ),
        (
            {"expert": 2, "tensor": 2, "model": MODELS["sequence"]},
            "model.balance=auxiliary_sequence: counts by sequence, and with tensor > 1 and expert > 1",
        ),
    ],
)
def test_a_broken_rule_is_one_line(tmp_path, given, line):
    with pytest.raises(ConfigError) as refused:
        tiny.recipe(tmp_path, **{"model": QWEN, **given})
    assert line in str(refused.value)


@pytest.mark.parametrize("given", [{"ac": SelectiveOp()}, {"blocks": True}, {"blocks": True, "ac": SelectiveOp()}])
def test_blocks_are_compiled_and_checkpointed_with_experts(tmp_path, given):
    assert tiny.recipe(tmp_path, model=QWEN, shard=2, expert=2, **given).layout.expert == 2


def test_the_axis_multiplies_nothing_and_has_its_name(tmp_path):
    made = tiny.recipe(tmp_path, model=QWEN, shard=2, tensor=2, expert=4)
    assert made.world == 4
    assert made.layout.label == "dp_s2·tp2·ep4"
    assert made.layout.expert_shard == 1
