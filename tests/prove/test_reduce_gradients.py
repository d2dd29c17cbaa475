"""Gradients that are reduced after each microbatch train as those that are reduced after the last one.

Both runs have the same layout, so that only `parallelism.reduce_gradients` can make them differ: losses and gradient
norms of five steps, the first step's gradients and the final parameters.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import tiny
from tests.cover import marks
from tests.prove.parity_rows import Row
from tests.prove.test_experts import MODELS
from titanlab.prove import tolerances
from titanlab.prove.parity import compare

# `make test` holds rows that reduce each microbatch to one process: parity_rows.py.
COVERING = [
    Row({"replicate": 2, "shard": 2, "microbatch": 1}, "gaps in the labels"),
    Row({"pipeline": 2, "shard": 2, "loss_chunk": 24}, "gaps in the labels"),
]
ROWS = [
    *COVERING,
    Row({"shard": 2, "microbatch": 1}, "clipped"),
    Row({"shard": 4, "microbatch": 1, "cpu_offload": True, "reshard_after_forward": "never"}),
    Row({"replicate": 2, "microbatch": 1}, "gaps in the labels"),
    Row({"shard": 2, "tensor": 2, "microbatch": 1}, "gaps in the labels"),
    Row({"shard": 2, "context": 2, "microbatch": 1}, "tied embeddings"),
    Row({"replicate": 2, "shard": 2, "tensor": 2, "microbatch": 1}, "clipped"),
    Row({"replicate": 2, "shard": 2, "context": 2, "microbatch": 1}, "fused, in tiles"),
    Row({"pipeline": 2, "shard": 2, "schedule": "gpipe", "reshard_after_forward": "always"}, "8 heads share 4"),
    Row({"pipeline": 2, "shard": 2, "schedule": "interleaved_1f1b"}, "clipped"),
    Row({"pipeline": 2, "replicate": 2, "shard": 2}, "gaps in the labels"),
    Row({"pipeline": 2, "shard": 2, "tensor": 2, "loss_chunk": 24}),
    Row({"replicate": 2, "shard": 2, "expert": 2, "microbatch": 1, "model": MODELS["qwen3"]}),
]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.kind}: {row.layout.label}", marks=marks(row, always=(), covering=COVERING))
        for row in ROWS
    ],
)
def test_a_layout_trains_the_same_either_way(traces, tmp_path, row):
    keys: dict[str, Any] = row.recipe_keys()
    if "model" in keys:
        del keys["layers"]
    each, last = ({**keys, "reduce_gradients": choice} for choice in ("each", "last"))
    made = [tiny.recipe(tmp_path, **keys) for keys in (each, last)]
    assert [recipe.reduces_each for recipe in made] == [True, False]
    assert made[0].microbatches > 1
    difference = compare(traces(**last), traces(**each))
    assert difference.largest <= tolerances.FP32, difference
