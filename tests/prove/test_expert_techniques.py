"""Models with experts train alike with every technique: checkpointing, compilation, precisions, optimizers."""

from __future__ import annotations

import itertools

import pytest

from tests import tiny
from tests.compile import test_blocks
from tests.prove.technique_rows import AC
from tests.prove.test_experts import BAR, MODELS, OnLayout
from titanlab.options import schema_of
from titanlab.prove.parity import compare
from titanlab.techniques.ac.recomputation_schema import SelectiveOp

COMMON = {"steps": 3, "global_batch": 8, "seq_len": 32, "eps": 1e-6, "at_end": False}
FSDP_TP = {"shard": 2, "tensor": 2}
PP = {"pipeline": 2, "shard": 2}
EP = {"shard": 2, "expert": 2}
EP_TP = {"shard": 2, "tensor": 2, "expert": 4}
EP_PP = {"pipeline": 2, "shard": 2, "expert": 2, "schedule": "zbv"}
ALWAYS, FULL = [], [pytest.mark.full]
# In fp32 against one process in eager mode without checkpointing.
EXACT = [
    (FSDP_TP, "full", "", FULL),
    (FSDP_TP, "selective_op", "aot_eager", FULL),
    (PP, "selective_op", "", FULL),
    (PP, "full", "aot_eager", FULL),
    ({"pipeline": 2, "schedule": "zbv"}, "none", "aot_eager", FULL),
    ({"context": 2}, "selective_layer", "aot_eager", FULL),
    (FSDP_TP, "memory_budget", "aot_eager", FULL),
    (FSDP_TP, "none", "inductor", FULL),
    ({}, "none", "inductor", FULL),
    (EP, "selective_op", "", FULL),
    (EP, "exchange kept", "", ALWAYS),
    (EP, "none", "aot_eager", FULL),
    (EP, "full", "aot_eager", FULL),
    (EP, "selective_op", "aot_eager", FULL),
    (EP, "exchange kept", "aot_eager", FULL),
    (EP, "memory_budget", "aot_eager", FULL),
    (EP, "none", "inductor", FULL),
    (EP, "exchange kept", "inductor", FULL),
    (EP_TP, "selective_op", "", FULL),
    (EP_TP, "none", "aot_eager", FULL),
    (EP_TP, "full", "inductor", FULL),
    ({"context": 2, "tensor": 2, "expert": 4}, "selective_op", "aot_eager", FULL),
    (EP_PP, "none", "aot_eager", FULL),
    (EP_PP, "selective_op", "", FULL),
    ({"shard": 4, "expert": 2, "microbatch": 1}, "selective_layer", "aot_eager", FULL),
]


def keys_of(given, **more):
    return {**OnLayout(given).keys(COMMON), "model": MODELS["qwen3"], **more}


def policy(name):
    if name == "exchange kept":
        return SelectiveOp(saved=["titanlab.exchange.default", "titanlab.grouped_product.default", "aten.mm.default"])
    return schema_of("ac", name)(**AC.get(name, {}))


@pytest.mark.parametrize(
    ("given", "ac", "backend"),
    [
        pytest.param(
            given, ac, backend, id=f"{OnLayout(given).label}, {ac}, {backend or 'eager'}",
            marks=layer,
        )
        for given, ac, backend, layer in EXACT
    ],
)  # fmt: skip
def test_a_technique_changes_nothing(pool, traces, tmp_path, given, ac, backend):
    compiled = {"blocks": True, "loss": True, "backend": backend} if backend else {}
    made = tiny.recipe(tmp_path, **keys_of(given, ac=policy(ac), **compiled))
    # Of each rank, the trace and how often each function was compiled.
    every = pool.run(made.world, test_blocks.traced, made, tiny.begin(made), limit_seconds=300.0)
    found, reference = every[0][0], traces(**keys_of({}))
    difference = compare(reference, found)
    assert difference.largest <= BAR, difference
    assert found.loads == reference.loads
    # Each step routes in another way, and compiles nothing again.
    assert all(one != other for one, other in itertools.pairwise(found.loads))
    assert {count for _, functions in every for count in functions.values()} == ({1} if backend else set())


PRECISIONS = [
    ("bf16", FSDP_TP, "", FULL),
    ("fp16", PP, "", FULL),
    ("bf16_full", FSDP_TP, "", FULL),
    ("float8_rowwise", FSDP_TP, "", FULL),
    ("float8_tensorwise", FSDP_TP, "", FULL),
    ("bf16", EP_TP, "aot_eager", FULL),
    ("float8_rowwise", EP, "aot_eager", FULL),
]


@pytest.mark.parametrize(
    ("precision", "given", "backend"),
    [
        pytest.param(precision, given, backend, marks=layer, id=f"{precision}, {OnLayout(given).label}")
        for precision, given, backend, layer in PRECISIONS
    ],
)
def test_a_precision_trains(traces, precision, given, backend):
    """Losses within 2 % of float32: rounded scores choose other experts for some tokens."""
    compiled = {"blocks": True, "backend": backend} if backend else {}
    found = traces(**keys_of(given, precision=schema_of("precision", precision)(), **compiled))
    assert found.losses == pytest.approx(traces(**keys_of({})).losses, rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adamw_4bit", "adamw_fp8"])
def test_an_optimizer_trains(traces, optimizer):
    reference = traces(**keys_of({}))
    found = traces(**keys_of({"shard": 2}, optimizer=schema_of("optimizer", optimizer)(lr=1e-3)))
    assert found.losses[0] == pytest.approx(reference.losses[0], rel=1e-5)
    assert found.losses[-1] < reference.losses[0]
