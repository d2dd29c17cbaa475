"""Expert parallelism trains as one process: losses, norms, gradients, parameters and the choice of experts."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.prove.test_experts import BAR, OnLayout, recipe, reference, traced  # noqa: F401
from titanlab.prove.parity import compare
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, SelectiveLayer

FULL = [pytest.mark.full]
AC = {"full": FullCheckpointing(), "selective_layer": SelectiveLayer(every=2)}
ROWS = [
    ("qwen3", {"shard": 2, "expert": 2}, FULL),
    ("qwen3", {"shard": 2, "tensor": 2, "expert": 4, "microbatch": 2}, FULL),
    ("qwen3", {"pipeline": 2, "shard": 2, "expert": 2, "schedule": "zbv", "ac": "full"}, FULL),
    ("qwen3", {"shard": 4, "expert": 2, "ac": "selective_layer"}, FULL),
    ("qwen3", {"shard": 4, "expert": 4, "microbatch": 1, "reshard_after_forward": "never"}, FULL),
    ("qwen3", {"tensor": 2, "expert": 2}, []),
    ("qwen3", {"tensor": 2, "shard": 2, "expert": 2, "ac": "full"}, FULL),
    ("qwen3", {"context": 2, "expert": 2}, []),
    ("qwen3", {"context": 2, "tensor": 2, "expert": 4}, FULL),
    ("qwen3", {"context": 2, "shard": 2, "expert": 2, "context_method": "all_gather"}, FULL),
    ("qwen3", {"replicate": 2, "shard": 2, "expert": 2}, []),
    ("qwen3", {"replicate": 2, "shard": 4, "expert": 2}, FULL),
    ("qwen3", {"replicate": 2, "tensor": 2, "expert": 2}, FULL),
    ("qwen3", {"shard": 2, "expert": 2, "max_grad_norm": 0.3}, []),
    ("qwen3", {"pipeline": 2, "tensor": 2, "expert": 2}, FULL),
    ("qwen3", {"pipeline": 2, "shard": 2, "expert": 2, "schedule": "gpipe"}, FULL),
    ("qwen3", {"pipeline": 2, "shard": 2, "expert": 2, "schedule": "looped_bfs"}, FULL),
    ("qwen3", {"pipeline": 2, "shard": 2, "expert": 2, "schedule": "interleaved_1f1b"}, []),
    ("qwen3", {"pipeline": 2, "shard": 2, "expert": 2, "schedule": "interleaved_zero_bubble"}, FULL),
    ("qwen3", {"pipeline": 2, "shard": 2, "expert": 2, "schedule": "dualpipe_v", "ac": "selective_layer"}, FULL),
    ("qwen3", {"pipeline": 2, "shard": 2, "expert": 2, "schedule": "csv"}, FULL),
    ("qwen3", {"pipeline": 2, "context": 2, "tensor": 2, "expert": 2, "schedule": "zbv"}, FULL),
    ("qwen3", {"pipeline": 2, "shard": 2, "context": 2, "tensor": 2, "expert": 8}, FULL),
    ("qwen3", {"pipeline": 2, "replicate": 2, "context": 2, "tensor": 2, "expert": 2}, FULL),
    # 3 experts of each rank cannot be divided among 2 shards.
    ("mixtral", {"shard": 4, "expert": 2}, FULL),
    ("mixtral", {"shard": 3, "expert": 3, "global_batch": 6}, FULL),
    ("mixtral", {"tensor": 4, "kv_heads": 4, "expert": 2}, FULL),
    ("batch", {"shard": 2, "tensor": 2, "expert": 2}, FULL),
    ("sequence", {"shard": 2, "expert": 2, "microbatch": 2}, FULL),
]


def made_of(folder, model, given):
    given = {**given, **({"ac": AC[given["ac"]]} if "ac" in given else {})}
    return recipe(folder, model, given)


@pytest.mark.parametrize(
    ("model", "given"),
    [pytest.param(model, given, marks=marks, id=f"{model}, {OnLayout(given).label}") for model, given, marks in ROWS],
)
def test_a_layout_trains_as_one_process(pool, reference, tmp_path, model, given):  # noqa: F811
    made = made_of(tmp_path, model, given)
    found = pool.run(made.world, traced, made, tiny.begin(made))[0]
    alone = {name: value for name, value in given.items() if name in ("max_grad_norm", "global_batch", "kv_heads")}
    wanted = reference(model, alone)
    difference = compare(wanted, found)
    assert difference.largest <= BAR, difference
    assert found.loads == wanted.loads
