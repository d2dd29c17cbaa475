"""What a rank of the real assembly does on tensors without data is what its recipe declares, to the byte."""

import pytest
import torch
import torch.distributed as dist

from tests import tiny
from titanlab.costs import traffic_metrics
from titanlab.distributed import traced
from titanlab.parallelism.collectives import reduce_scatter
from titanlab.prove import TraceComparison
from titanlab.prove.declared import declared
from titanlab.prove.rank_trace import fake_world, trace_rank
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, SelectiveLayer, SelectiveOp
from titanlab.techniques.model.llama_schema import Mixtral, Qwen3Moe
from titanlab.techniques.optimizer.optimizers_schema import Muon
from titanlab.techniques.precision.cast_schema import Fp16
from titanlab.techniques.precision.float8_schema import Float8Tensorwise
from titanlab.techniques.schedule.published_schema import ZBV, DualPipeV, Interleaved1F1B, InterleavedZeroBubble

EXPERTS = {"global_batch": 16}
SIZES = {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 256}
QWEN = Qwen3Moe(**SIZES, head_dim=32, ffn_dim=32, experts=8, active_experts=2)
MIXTRAL = Mixtral(**SIZES, ffn_dim=48, experts=6, active_experts=3)
SAVED = ["titanlab.grouped_product.default", "aten.mm.default"]
WIDE = {"dim": 128, "heads": 16, "kv_heads": 8, "ffn_dim": 256}
# From one axis to four, and worlds of up to 512 ranks. Every policy of checkpointing, and uneven shards.
LAYOUTS = {
    "one process": {"ac": SelectiveOp()},
    "1D": {"shard": 64, "global_batch": 64, "bf16": True, "ac": FullCheckpointing()},
    "1D, uneven": {"shard": 4, "microbatch": 1, "vocab_size": 257, "ac": SelectiveLayer(every=2)},
    "HSDP": {"replicate": 4, "shard": 8, "global_batch": 64, "microbatch": 1, "bf16": True},
    "HSDP, each microbatch reduced": {"replicate": 4, "shard": 8, "global_batch": 128, "microbatch": 1, "bf16": True,
            "reduce_gradients": "each"},
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
    "4D, blocks reduced": {"pipeline": 2, "shard": 2, "context": 2, "tensor": 2, "layers": 4, "global_batch": 16,
            "bf16": True, "reduce_gradients": "each"},
    "5 axes": {"replicate": 2, "pipeline": 2, "shard": 2, "context": 2, "tensor": 2, "layers": 4, "bf16": True,
               "global_batch": 32, "schedule": InterleavedZeroBubble()},
    "experts": {**EXPERTS, "model": QWEN},
    "experts divided among shards": {**EXPERTS, "model": QWEN, "shard": 4, "bf16": True, "ac": FullCheckpointing()},
    # Then FSDP2 shards another dim of the stacked matrices.
    "experts that cannot be divided": {**EXPERTS, "model": MIXTRAL, "shard": 4, "tensor": 2, "ac": SelectiveOp(saved=SAVED)},
    "no sequence parallelism": {**EXPERTS, "model": QWEN, "tensor": 2, "sequence_parallel": False, "ac": FullCheckpointing()},
    "expert 2, each microbatch reduced": {**EXPERTS, "model": QWEN, "shard": 2, "expert": 2, "microbatch": 1,
            "reduce_gradients": "each"},
    "expert 2": {**EXPERTS, "model": QWEN, "shard": 2, "expert": 2},
    "expert 2 of shard 4": {**EXPERTS, "model": QWEN, "shard": 4, "expert": 2, "bf16": True, "ac": FullCheckpointing()},
    "expert 4 of shard 2, tensor 2": {**EXPERTS, "model": QWEN, "shard": 2, "tensor": 2, "expert": 4, "ac": FullCheckpointing()},
    "expert 2 of tensor 2": {**EXPERTS, "model": QWEN, "tensor": 2, "expert": 2},
    "expert 2, few results kept": {**EXPERTS, "model": QWEN, "shard": 2, "tensor": 2, "expert": 2, "bf16": True,
                                   "ac": SelectiveOp()},
    "expert 2, the exchange kept": {**EXPERTS, "model": QWEN, "shard": 2, "expert": 2, "microbatch": 2,
                                    "ac": SelectiveOp(saved=[*SAVED, "titanlab.exchange.default"])},
    "expert 2, sorted rows kept": {**EXPERTS, "model": QWEN, "tensor": 2, "expert": 2,
                                   "ac": SelectiveOp(saved=["aten.index_select.default"])},
    "expert 2 of context 2, HSDP": {**EXPERTS, "model": QWEN, "replicate": 2, "context": 2, "expert": 2, "bf16": True},
    "expert 2 of 8 shards": {**EXPERTS, "model": MIXTRAL, "shard": 8, "expert": 2, "microbatch": 1},
    "expert 8 of 64": {**EXPERTS, "model": QWEN, "shard": 64, "expert": 8, "global_batch": 64, "bf16": True},
    "expert 4 in a pipeline": {**EXPERTS, "model": QWEN, "pipeline": 2, "shard": 2, "context": 2, "tensor": 2, "expert": 4,
                               "global_batch": 4, "schedule": ZBV()},
    "5 axes, experts": {**EXPERTS, "model": QWEN, "replicate": 2, "pipeline": 2, "shard": 2, "context": 2, "tensor": 2, "bf16": True,
               "schedule": ZBV()},
}  # fmt: skip
# The axes, schedules and policies of the slower ones are in these rows too.
ALWAYS = ("one process", "1D, uneven", "HSDP", "2D, fused", "2D, context", "experts that cannot be divided")


def recipe(folder, layout):
    schedule = {key: value for key, value in layout.items() if key == "schedule"}
    made = tiny.recipe(folder, **{key: value for key, value in layout.items() if key not in schedule})
    return tiny.changed(made, **schedule)


def accounts(made, ranks):
    return [trace_rank(made, rank) for rank in ranks]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.full]) for name in LAYOUTS]
)
def test_what_is_traced_is_what_is_declared(pool, tmp_path, name):
    made = recipe(tmp_path, LAYOUTS[name])
    # The last rank has other shards, other chunks of sequences, and another stage of the pipeline than the first one.
    ranks = sorted({0, made.world - 1})
    (traced,) = pool.run(1, accounts, made, ranks, limit_seconds=300)
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


def rows_of(nccl):
    with fake_world(3, 64, nccl=nccl) as (world, mode), mode, traced({}) as traffic:
        summand = torch.empty(64 << 20)
        reduce_scatter(summand.new_empty(1 << 20), summand, dist.group.WORLD)
        assert (world.rank, world.world, dist.get_rank()) == (3, 64, 3)
        assert summand.untyped_storage().device.type == "meta"
    assert not dist.is_initialized()
    return [(row.kind, row.bytes) for row in traffic.rows()]


@pytest.mark.parametrize(("nccl", "kind"), [(True, "reduce_scatter"), (False, "all_to_all")])
def test_a_scatter_is_that_of_the_backend_for_which_it_stands(pool, nccl, kind):
    assert pool.run(1, rows_of, nccl) == [[(kind, 4 * (64 << 20))]]
