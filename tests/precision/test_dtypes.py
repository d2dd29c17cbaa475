"""Which dtype where: at rest, gathered, computed, reduced, and in the optimizer."""

import os
from unittest.mock import patch

import pytest
import torch

from tests import tiny
from titanlab.distributed import build_mesh, joined, open_world
from titanlab.parallelism import shard
from titanlab.techniques.precision.cast_schema import Bf16, Bf16Full, Fp16, Fp32
from titanlab.techniques.precision.contract import BYTES
from titanlab.train import StepBatch
from titanlab.train.assemble import assemble

# Who is looked at: the embedding, a product in a block, a norm in a block, the last norm, the head.
WATCHED = ("tok_embeddings", "layers.0.attention.wq", "layers.1.ffn_norm", "layers.1.feed_forward.w2", "norm", "output")


def looked_at(made):
    """By what → names of dtypes, of one step on this rank."""
    found = {}

    def note(what, tensor):
        found.setdefault(what, set()).add(str(tensor.dtype).removeprefix("torch."))

    reduce = shard.reduce_scatter

    def noted_reduce(output, summand, group):
        note("reduced", summand)
        reduce(output, summand, group)

    with (
        patch.object(shard, "reduce_scatter", noted_reduce),
        open_world(joined(os.environ), accelerator="cpu", seed=0, deterministic=False) as world,
    ):
        assembled = assemble(made, world, build_mesh(made.layout, "cpu"))
        model = assembled.model
        for name in WATCHED:
            module = model.get_submodule(name)

            def look(module, inputs, output, name=name):
                note(f"{name} gives", output)
                for parameter in module.parameters(recurse=False):
                    note(f"{name} is gathered", parameter)

            # The first to look: before what casts the output.
            module.register_forward_hook(look, prepend=True)
        model.register_forward_hook(lambda *seen: note("logits", seen[-1]))
        optimizer = made.optimizer.implementation().build(dict(model.named_parameters()))
        tokens = torch.arange(made.local_batch * made.training.seq_len).view(made.local_batch, -1) % 256
        sums = assembled.forward_backward(StepBatch(tokens, tokens, tokens.numel()))
        note("loss", sums.loss_sum)
        for parameter in model.parameters():
            note("parameters", parameter)
            note("gradients", parameter.grad)
        assembled.loss_scale.step(optimizer)
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                note("states", state[name])
    return {what: names.pop() if len(names) == 1 else sorted(names) for what, names in found.items()}


def expected(*, master, compute, reduce, **others):
    whole = dict.fromkeys(("parameters", "gradients", "states"), master)
    computed = {f"{name} {what}": compute for name in WATCHED for what in ("gives", "is gathered")}
    return {**whole, **computed, "logits": compute, "loss": "float32", "reduced": reduce, **others}


F32, B16, F16 = "float32", "bfloat16", "float16"
EDGES = {f"{name} {what}": F32 for name in ("tok_embeddings", "output") for what in ("gives", "is gathered")}
EVERY = [
    (Fp32(), expected(master=F32, compute=F32, reduce=F32)),
    (Bf16(), expected(master=F32, compute=B16, reduce=F32)),
    (Bf16(reduce="bf16"), expected(master=F32, compute=B16, reduce=B16)),
    (Fp16(), expected(master=F32, compute=F16, reduce=F32)),
    (Fp16(reduce="fp16"), expected(master=F32, compute=F16, reduce=F16)),
    (Bf16Full(), expected(master=B16, compute=B16, reduce=F32)),
    (Bf16Full(reduce="bf16"), expected(master=B16, compute=B16, reduce=B16)),
    (
        Bf16(fp32_parts=["embedding", "head"], reduce="bf16"),
        expected(master=F32, compute=B16, **{"reduce": [B16, F32], "logits": F32, **EDGES}),
    ),
    (
        Fp16(fp32_parts=["layers.0", "norm"]),
        expected(
            master=F32,
            compute=F16,
            reduce=F32,
            **{f"{name} {what}": F32 for name in (WATCHED[1], "norm") for what in ("gives", "is gathered")},
        ),
    ),
]


# What they change, one of the others changes too.
SLOWER = (Fp16(reduce="fp16"), Bf16Full(reduce="bf16"), Fp16(fp32_parts=["layers.0", "norm"]))


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [pytest.param(*row, marks=[pytest.mark.full] if row[0] in SLOWER else []) for row in EVERY],
    ids=lambda value: str(getattr(value, "kind", "")),
)
def test_every_dtype_is_what_the_precision_says(pool, tmp_path, precision, wanted):
    # To the nearest: torch's own optimizer, whose states can be looked at.
    made = tiny.recipe(tmp_path, shard=2, precision=precision, rounding="nearest")
    for found in pool.run(2, looked_at, made):
        assert found == wanted


def test_tied_tables_are_gathered_once_for_both(pool, tmp_path):
    made = tiny.recipe(tmp_path, shard=2, tied_embeddings=True, precision=Bf16(fp32_parts=["embedding", "head"]))
    wanted = expected(master=F32, compute=B16, **{"reduce": F32, "logits": F32, **EDGES})
    # The head has no parameter.
    del wanted["output is gathered"]
    for found in pool.run(2, looked_at, made):
        assert found == wanted


def test_bytes_are_those_of_torchs_dtypes():
    assert {name: getattr(torch, name).itemsize for name in BYTES} == BYTES


@pytest.mark.parametrize(
    ("precision", "wrapped"),
    [
        (Fp32(), False),
        (Bf16(), True),
        (Bf16Full(reduce="bf16"), False),
        pytest.param(Fp16(), True, marks=pytest.mark.full),
        pytest.param(Bf16Full(), True, marks=pytest.mark.full),
    ],
    ids=lambda value: str(getattr(value, "kind", value)),
)
def test_plain_replicas_are_ddps_where_nothing_has_to_be_cast(pool, tmp_path, precision, wrapped):
    made = tiny.recipe(tmp_path, replicate=2, precision=precision)
    assert pool.run(2, under_fsdp, made) == [wrapped] * 2


def under_fsdp(made):
    from torch.distributed.fsdp import FSDPModule

    with open_world(joined(os.environ), accelerator="cpu", seed=0, deterministic=False) as world:
        return isinstance(assemble(made, world, build_mesh(made.layout, "cpu")).model, FSDPModule)
