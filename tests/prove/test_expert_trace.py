"""What a rank of a model with experts stores, keeps and communicates is what its recipe declares."""

from __future__ import annotations

import pytest

from tests import tiny
from tests.prove.test_rank_trace import accounts
from titanlab.costs import traffic_metrics
from titanlab.prove import TraceComparison
from titanlab.prove.declared import declared
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, SelectiveOp
from titanlab.techniques.model.llama_schema import Mixtral, Qwen3Moe
from titanlab.techniques.schedule.published_schema import ZBV

SIZES = {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 256}
QWEN = Qwen3Moe(**SIZES, head_dim=32, ffn_dim=32, experts=8, active_experts=2)
MIXTRAL = Mixtral(**SIZES, ffn_dim=48, experts=6, active_experts=3)
SAVED = ["titanlab.grouped_product.default", "aten.mm.default"]
LAYOUTS = {
    "one process": {"model": QWEN},
    "experts divided among shards": {"model": QWEN, "shard": 4, "bf16": True, "ac": FullCheckpointing()},
    # Then FSDP2 shards another dim of the stacked matrices.
    "experts that cannot be divided": {"model": MIXTRAL, "shard": 4, "tensor": 2, "ac": SelectiveOp(saved=SAVED)},
    "no sequence parallelism": {"model": QWEN, "tensor": 2, "sequence_parallel": False, "ac": FullCheckpointing()},
    "expert 2": {"model": QWEN, "shard": 2, "expert": 2},
    "expert 2 of shard 4": {"model": QWEN, "shard": 4, "expert": 2, "bf16": True, "ac": FullCheckpointing()},
    "expert 4 of shard 2, tensor 2": {"model": QWEN, "shard": 2, "tensor": 2, "expert": 4, "ac": FullCheckpointing()},
    "expert 2 of tensor 2": {"model": QWEN, "tensor": 2, "expert": 2},
    "expert 2, few results kept": {"model": QWEN, "shard": 2, "tensor": 2, "expert": 2, "bf16": True,
                                   "ac": SelectiveOp()},
    "expert 2, the exchange kept": {"model": QWEN, "shard": 2, "expert": 2, "microbatch": 2,
                                    "ac": SelectiveOp(saved=[*SAVED, "titanlab.exchange.default"])},
    "expert 2, sorted rows kept": {"model": QWEN, "tensor": 2, "expert": 2,
                                   "ac": SelectiveOp(saved=["aten.index_select.default"])},
    "expert 2 of context 2, HSDP": {"model": QWEN, "replicate": 2, "context": 2, "expert": 2, "bf16": True},
    "expert 2 of 8 shards": {"model": MIXTRAL, "shard": 8, "expert": 2, "microbatch": 1},
    "expert 8 of 64": {"model": QWEN, "shard": 64, "expert": 8, "global_batch": 64, "bf16": True},
    "expert 4 in a pipeline": {"model": QWEN, "pipeline": 2, "shard": 2, "context": 2, "tensor": 2, "expert": 4,
                               "global_batch": 4, "schedule": ZBV()},
    "5 axes": {"model": QWEN, "replicate": 2, "pipeline": 2, "shard": 2, "context": 2, "tensor": 2, "bf16": True,
               "schedule": ZBV()},
}  # fmt: skip


# Only in `make test-full`.
FULL = ("expert 2 of context 2, HSDP", "expert 2 of 8 shards", "expert 8 of 64", "expert 2 of tensor 2", "expert 2",
        "expert 2, few results kept", "expert 2, sorted rows kept", "expert 2, the exchange kept",
        "experts divided among shards", "expert 2 of shard 4", "expert 4 of shard 2, tensor 2", "no sequence parallelism",
        "5 axes")  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in FULL else []) for name in LAYOUTS]
)
def test_what_is_traced_is_what_is_declared(pool, tmp_path, name):
    layout = dict(LAYOUTS[name])
    schedule = {"schedule": layout.pop("schedule")} if "schedule" in layout else {}
    made = tiny.changed(tiny.recipe(tmp_path, **{"global_batch": 16, **layout}), **schedule)
    ranks = sorted({0, made.world - 1})
    (traced,) = pool.run(1, accounts, made, ranks)
    pairs = tuple((declared(made, rank), own) for rank, own in zip(ranks, traced, strict=True))
    assert TraceComparison(recipe=made, notes=(), pairs=pairs).differing == []
    for one, own in pairs:
        assert traffic_metrics(one.traffic) == traffic_metrics(own.traffic)
