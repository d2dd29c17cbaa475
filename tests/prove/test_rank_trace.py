"""What a rank of the real assembly does on tensors without data is what its recipe declares, to the byte."""

from __future__ import annotations

import pytest

from tests import tiny
from titanlab.costs import traffic_metrics
from titanlab.prove import TraceComparison
from titanlab.prove.declared import declared
from titanlab.prove.rank_trace import trace_rank
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, SelectiveLayer, SelectiveOp
from titanlab.techniques.optimizer.optimizers_schema import Muon
from titanlab.techniques.precision.cast_schema import Fp16
from titanlab.techniques.precision.float8_schema import Float8Tensorwise
from titanlab.techniques.schedule.published_schema import ZBV, DualPipeV, Interleaved1F1B, InterleavedZeroBubble

WIDE = {"dim": 128, "heads": 16, "kv_heads": 8, "ffn_dim": 256}
# From one axis to four, and worlds of up to 512 ranks. Every policy of checkpointing, and uneven shards.
LAYOUTS = {
    "one process": {"ac": SelectiveOp()},
    "1D": {"shard": 64, "global_batch": 64, "bf16": True, "ac": FullCheckpointing()},
    "1D, uneven": {"shard": 4, "microbatch": 1, "vocab_size": 257, "ac": SelectiveLayer(every=2)},
    "HSDP": {"replicate": 4, "shard": 8, "global_batch": 64, "microbatch": 1, "bf16": True},
    "2D, float8": {"shard": 8, "tensor": 4, "kv_heads": 4, "global_batch": 16, "precision": Float8Tensorwise()},
    "2D, fused": {"shard": 2, "tensor": 2, "fused": True, "seq_len": 192, "global_batch": 4, "ac": SelectiveOp()},
    "2D, fused, split backward": {"pipeline": 2, "tensor": 2, "fused": True, "layers": 4, "schedule": ZBV()},
    "2D, context": {"shard": 2, "context": 4, "seq_len": 64, "global_batch": 4, "ac": FullCheckpointing()},
    "2D, pipeline": {"pipeline": 2, "shard": 4, "schedule": ZBV(), "layers": 4},
    "3D": {**WIDE, "pipeline": 8, "shard": 8, "tensor": 8, "layers": 16, "global_batch": 64, "bf16": True,
           "schedule": Interleaved1F1B(), "ac": FullCheckpointing()},
    "3D, no sequence parallelism": {"shard": 2, "context": 2, "tensor": 2, "sequence_parallel": False,
                                    "global_batch": 4, "context_method": "all_gather", "ac": FullCheckpointing()},
    "4D": {**WIDE, "pipeline": 4, "shard": 4, "context": 4, "tensor": 8, "layers": 4, "seq_len": 64,
           "global_batch": 32, "bf16": True, "ac": SelectiveOp()},
    "4D, split backward": {"pipeline": 2, "shard": 2, "context": 2, "tensor": 2, "layers": 4, "global_batch": 16,
                           "schedule": DualPipeV()},
    "5 axes": {"replicate": 2, "pipeline": 2, "shard": 2, "context": 2, "tensor": 2, "layers": 4, "bf16": True,
               "global_batch": 32, "schedule": InterleavedZeroBubble()},
}  # fmt: skip
# Their axes, schedules and policies are in the other rows too, or in a row of test_expert_trace.py: all axes at once.
SLOWER = ("4D", "4D, split backward", "5 axes", "3D", "3D, no sequence parallelism", "2D, fused, split backward")


def recipe(folder, layout):
    schedule = {key: value for key, value in layout.items() if key == "schedule"}
    made = tiny.recipe(folder, **{key: value for key, value in layout.items() if key not in schedule})
    return tiny.changed(made, **schedule)


def accounts(made, ranks):
    return [trace_rank(made, rank) for rank in ranks]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOWER else []) for name in LAYOUTS]
)
def test_what_is_traced_is_what_is_declared(pool, tmp_path, name):
    made = recipe(tmp_path, LAYOUTS[name])
    # The last rank has other shards, other chunks of sequences, and another stage of the pipeline than the first one.
    ranks = sorted({0, made.world - 1})
    (traced,) = pool.run(1, accounts, made, ranks)
    pairs = tuple((declared(made, rank), own) for rank, own in zip(ranks, traced, strict=True))
    found = TraceComparison(recipe=made, notes=(), pairs=pairs)
    assert found.differing == []
    for one, own in pairs:
        # Rows that the comparison does not show: bytes on the wire.
        assert traffic_metrics(one.traffic) == traffic_metrics(own.traffic)
    assert any(own.saved for _, own in pairs)


def test_a_stage_may_have_no_block(pool, tmp_path):
    made = recipe(tmp_path, {"pipeline": 2, "split": ["output"], "precision": Fp16()})
    ((own,),) = pool.run(1, accounts, made, [1])
    found = TraceComparison(recipe=made, notes=(), pairs=((declared(made, 1), own),))
    assert (found.differing, own.saved) == ([], {})


def test_the_optimizers_communication_is_traced_too(pool, tmp_path):
    made = tiny.recipe(tmp_path, shard=2, optimizer=Muon())
    ((own,),) = pool.run(1, accounts, made, [0])
    assert {row.kind for row in own.update_traffic} == {"all_to_all"}
    assert own.optimizer_bytes == declared(made, 0).optimizer_bytes
