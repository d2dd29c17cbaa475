"""What the formulas say is what is sent, operation by operation and to the byte."""

import contextlib
import os
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import tiny
from titanlab.costs import Coordinate, step_traffic, traffic_metrics
from titanlab.data import source
from titanlab.distributed import axis_groups, build_mesh, joined, open_world, traced
from titanlab.parallelism import Gradients
from titanlab.recipe import Recipe, step_of
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, SelectiveLayer, SelectiveOp
from titanlab.techniques.precision.cast_schema import Bf16, Bf16Full, Fp16
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8Tensorwise
from titanlab.techniques.schedule.published_schema import ZBV, GPipe, Interleaved1F1B, LoopedBFS
from titanlab.train import Reduction, StepBatch, assemble


def traffic_of(made: Recipe, steps: int):
    """Rows of each of the first steps of a run, and this rank's place."""
    with open_world(joined(os.environ), accelerator="cpu", seed=made.seed, deterministic=False) as world:
        mesh = build_mesh(made.layout, "cpu")
        assembled = assemble.assemble(made, world, mesh)
        assembled.after_update()
        parameters = list(assembled.model.parameters())
        gradients = Gradients(parameters, world.world // made.layout.pipeline)
        stream = source.open_train(
            made.data,
            seed=made.seed,
            seq_len=made.training.seq_len,
            global_batch=made.training.global_batch,
            rank=mesh.data_rank,
            ranks=made.layout.data,
            state=None,
        )
        tables = []
        for _ in range(steps):
            batch = assembled.to_device(stream.next_batch())
            with traced(axis_groups(mesh)) as traffic:
                sums = assembled.forward_backward(batch)
                Reduction(
                    world,
                    squared_norm=gradients.squared_norm(),
                    loss_sum=sums.loss_sum,
                    tokens=sums.tokens,
                    stop=0,
                    nominal_tokens=made.tokens_per_step,
                )
            tables.append(traffic.rows())
            for parameter in parameters:
                parameter.grad = None
        stream.close()
        place = Coordinate(**{axis: mesh.coordinate(axis) for axis in ("pipeline", "context", "tensor")})
    return place, tables


# Axes and choices that send differently, most of them with only one other that could interfere.
LAYOUTS = [
    {"shard": 2},
    {"shard": 2, "microbatch": 2, "reshard_after_forward": "never"},
    {"replicate": 2},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": False},
    {"tensor": 2, "loss_parallel": False, "vocab_size": 257},
    {"context": 2},
    {"pipeline": 2, "microbatch": 3},
    {"replicate": 2, "precision": Bf16Full(reduce="bf16")},
    # Each microbatch reduces.
    {"replicate": 2, "shard": 2, "microbatch": 1, "reduce_gradients": "each"},
    # What is computed again is communicated again.
    {"context": 2, "context_method": "all_gather", "ac": FullCheckpointing()},
]
FULL = [
    {"shard": 4, "vocab_size": 257},
    {"replicate": 2, "bf16": True},
    {"replicate": 2, "shard": 2},
    # 192 tokens of a microbatch in three chunks, the last of which is smaller.
    {"tensor": 2, "microbatch": 6, "loss_chunk": 72},
    {"pipeline": 2, "layers": 4, "shard": 2, "microbatch": 2, "schedule": ZBV()},
    {"shard": 2, "microbatch": 3, "precision": Float8Tensorwise()},
    {"tensor": 2, "microbatch": 6, "ac": FullCheckpointing()},
    {"shard": 2, "microbatch": 2, "reduce_gradients": "each"},
    {"pipeline": 2, "shard": 2, "microbatch": 2, "loss_chunk": 24, "reduce_gradients": "each"},
    {"context": 4, "context_method": "all_gather"},
    {"pipeline": 2, "shard": 2, "reshard_after_forward": "always"},
    {"pipeline": 2, "layers": 4, "schedule": Interleaved1F1B()},
    {"shard": 2, "tensor": 2, "microbatch": 3, "precision": Bf16(fp32_parts=["embedding", "head"])},
    {"shard": 2, "tensor": 2, "microbatch": 3, "bf16": True},
    {"context": 2, "tensor": 2, "ac": SelectiveLayer(every=2)},
    {
        "shard": 2,
        "tensor": 2,
        "loss_parallel": False,
        "precision": Bf16(reduce="bf16", fp32_parts=["head", "layers.1"]),
    },
    {"shard": 2, "tensor": 2, "precision": Float8Tensorwise(skip=["output", "wk"])},
    {"replicate": 2, "shard": 2, "precision": Float8Tensorwise()},
    {"shard": 2, "precision": Float8Rowwise()},
    {"pipeline": 2, "shard": 2, "precision": Float8Tensorwise()},
    {"shard": 2, "microbatch": 3, "precision": Bf16(reduce="bf16")},
    {"shard": 2, "microbatch": 3, "precision": Bf16(fp32_parts=["layers.*"])},
    {"replicate": 2, "shard": 2, "precision": Fp16(reduce="fp16", fp32_parts=["norm"])},
    {"shard": 2, "tied_embeddings": True, "precision": Bf16(reduce="bf16", fp32_parts=["embedding", "head"])},
    {"tensor": 2, "tied_embeddings": True, "precision": Bf16(fp32_parts=["embedding", "head", "norm"])},
    {"context": 2, "tensor": 2, "precision": Bf16(fp32_parts=["layers.0", "norm"])},
    {"pipeline": 2, "shard": 2, "precision": Bf16(reduce="bf16", fp32_parts=["embedding", "head"])},
    {"pipeline": 2, "tensor": 2, "precision": Fp16(fp32_parts=["*"])},
    {"tensor": 2, "shard": 2, "precision": Bf16Full()},
    {"tensor": 2, "precision": Bf16Full(reduce="bf16")},
    {"shard": 2, "cpu_offload": True},
    {"replicate": 2, "microbatch": 3},
    {"shard": 2, "tensor": 2, "sequence_parallel": False},
    {"replicate": 2, "tensor": 2},
    {"context": 2, "context_method": "all_gather", "bf16": True},
    {"shard": 2, "context": 2},
    {"pipeline": 2, "replicate": 2},
    {"pipeline": 2, "context": 2},
    {"pipeline": 2, "tensor": 2, "sequence_parallel": False},
    {"pipeline": 2, "layers": 4, "shard": 2, "schedule": LoopedBFS(), "reshard_after_forward": "always"},
    {"pipeline": 4, "layers": 4, "schedule": GPipe()},
    {"pipeline": 2, "shard": 2, "tensor": 2, "global_batch": 8},
    {"shard": 2, "context": 2, "tensor": 2, "global_batch": 8},
    {"tensor": 2, "sequence_parallel": False, "ac": FullCheckpointing()},
    {"tensor": 2, "ac": SelectiveOp()},
    {"context": 4, "ac": FullCheckpointing()},
    {"context": 2, "tensor": 2, "ac": SelectiveOp()},
    {"pipeline": 2, "layers": 4, "tensor": 2, "ac": FullCheckpointing(), "schedule": ZBV()},
    {"replicate": 2, "microbatch": 2, "reduce_gradients": "each"},
    {"replicate": 2, "microbatch": 2, "reduce_gradients": "each", "bf16": True},
    {"shard": 2, "microbatch": 2, "reduce_gradients": "each", "reshard_after_forward": "never"},
    {"shard": 2, "microbatch": 2, "reduce_gradients": "each", "precision": Fp16(reduce="fp16", fp32_parts=["norm"])},
    {"shard": 2, "microbatch": 3, "reduce_gradients": "each", "precision": Float8Tensorwise()},
    {"shard": 2, "tensor": 2, "microbatch": 2, "reduce_gradients": "each"},
    {"shard": 2, "context": 2, "microbatch": 2, "reduce_gradients": "each"},
    {"pipeline": 2, "replicate": 2, "shard": 2, "layers": 4, "reduce_gradients": "each", "schedule": GPipe()},
    {"pipeline": 2, "layers": 4, "shard": 2, "reduce_gradients": "each", "schedule": LoopedBFS()},
    {"pipeline": 2, "replicate": 2, "shard": 2, "loss_chunk": 24, "reduce_gradients": "each", "bf16": True},
]
MATRIX = {"pipeline": 2, "shard": 2, "context": 2, "tensor": 2, "global_batch": 8}


def label(layout):
    return ",".join(f"{key}={getattr(each, 'kind', each)}" for key, each in layout.items())


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS,
        *(pytest.param(layout, marks=pytest.mark.full) for layout in FULL),
        pytest.param(MATRIX, marks=pytest.mark.full),
    ],
    ids=label,
)
def test_what_is_sent_is_what_the_formulas_say(pool, tmp_path, layout):
    schedule = {key: layout[key] for key in layout if key == "schedule"}
    made = tiny.recipe(tmp_path, **{key: layout[key] for key in layout if key not in schedule})
    made = tiny.changed(made, **schedule)
    step = step_of(made)
    # The second step is as the first, but for DDP, which takes its buckets anew after the first.
    for place, tables in pool.run(made.world, traffic_of, made, 1 if step.replicas_by_ddp else 2):
        for rows in tables:
            assert traffic_metrics(rows) == traffic_metrics(step_traffic(step, place)), place


def traffic_with_one_more(made):
    """A reduction that is not needed, as small as can be."""
    right = assemble.Stage.finish_gradients

    def wrong(self):
        dist.all_reduce(torch.zeros(1))
        right(self)

    with patch.object(assemble.Stage, "finish_gradients", wrong):
        return traffic_of(made, 1)


def test_a_planted_reduction_is_found(pool, tmp_path):
    made = tiny.recipe(tmp_path, shard=2)
    place, (rows,) = pool.run(2, traffic_with_one_more, made)[0]
    expected = {row.kind: row for row in step_traffic(step_of(made), place)}
    found = {row.kind: row for row in rows}
    assert found["all_reduce"].count == expected["all_reduce"].count + 1
    assert found["all_reduce"].bytes == expected["all_reduce"].bytes + 4
    assert [kind for kind in expected if found[kind] != expected[kind]] == ["all_reduce"]


def gradients_of(made, trace):
    with open_world(joined(os.environ), accelerator="cpu", seed=made.seed, deterministic=False) as world:
        mesh = build_mesh(made.layout, "cpu")
        assembled = assemble.assemble(made, world, mesh)
        tokens = torch.arange(12 * 16).view(12, 16) % 256
        batch = StepBatch(tokens, tokens, tokens.numel())
        with traced(axis_groups(mesh)) if trace else contextlib.nullcontext():
            assembled.forward_backward(batch)
        return [parameter.grad.to_local().numpy().copy() for parameter in assembled.model.parameters()]


def test_tracing_changes_no_bit(pool, tmp_path):
    made = tiny.recipe(tmp_path, context=2)
    without, within = (pool.run(2, gradients_of, made, trace) for trace in (False, True))
    for bare, seen in zip(without, within, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(bare, seen, strict=True))
