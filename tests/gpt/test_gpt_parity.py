"""A model that titanlab does not know trains in every layout as in one process.

Bars as in tests/prove/test_parity_matrix.py: 1e-5, relative, in fp32.
"""

from __future__ import annotations

import pytest
from tiny_gpt.first_blocks_schema import FirstBlocks
from tiny_gpt.fp64_schema import Fp64
from tiny_gpt.gpt_schema import Gpt

from tests.prove.parity_rows import COMMON, SCHEDULES
from titanlab.prove.parity import compare
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, SelectiveOp
from titanlab.techniques.precision.cast_schema import Bf16

BAR = 1e-5
LAYERS = 4
COMPILED = {"blocks": True, "loss": True, "backend": "aot_eager"}
KINDS = {"plain": {}, "tied head": {"tied_head": True}, "odd sizes": {"vocab_size": 257, "places": 33}}

ROWS = [
    ("plain", {"tensor": 2}, False),
    ("plain", {"context": 2}, False),
    ("plain", {"pipeline": 2, "shard": 2, "schedule": "zbv"}, False),
    ("tied head", {"shard": 2, "tensor": 2}, False),
    ("plain", {"replicate": 2}, False),
    ("plain", {"shard": 2}, False),
    ("plain", {"tensor": 2, "sequence_parallel": False}, False),
    ("plain", {"tensor": 2, "loss_parallel": False}, False),
    ("plain", {"tensor": 4, "microbatch": 2}, False),
    ("plain", {"context": 2, "context_method": "all_gather"}, False),
    ("plain", {"pipeline": 2}, True),
    ("plain", {"pipeline": 2, "schedule": "zbv"}, False),
    ("plain", {"pipeline": 2, "tensor": 2, "schedule": "zbv"}, False),
    ("plain", {"shard": 2, "tensor": 2}, False),
    ("plain", {"context": 2, "tensor": 2}, False),
    ("tied head", {"tensor": 2, "loss_parallel": False}, False),
    ("odd sizes", {"tensor": 2}, False),
    ("odd sizes", {"shard": 2, "context": 2}, False),
    ("plain", {"pipeline": 2, "shard": 2, "context": 2, "tensor": 2}, False),
]


def keys_of(kind="plain", **given):
    sizes = {"width": 64, "depth": LAYERS, "heads": 4, "places": 48, "vocab_size": 256, **KINDS[kind]}
    keys = {**COMMON, **given}
    keys.pop("layers")
    layout = {axis: keys.get(axis, 1) for axis in ("shard", "replicate", "pipeline")}
    if layout["pipeline"] > 1:
        keys.setdefault("microbatch", 8 // (layout["shard"] * layout["replicate"]) // 4 or 1)
    if "schedule" in keys:
        keys["pipeline_schedule"] = SCHEDULES[keys.pop("schedule")]
    return {**keys, "model": Gpt(**sizes)}


def label(kind, given):
    return f"{kind}: " + ",".join(f"{key}={value}" for key, value in given.items())


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        pytest.param(kind, given, id=label(kind, given), marks=[] if always else [pytest.mark.full])
        for kind, given, always in ROWS
    ],
)
def test_a_layout_trains_as_one_process(traces, kind, given):
    trace = traces(**keys_of(kind, **given))
    assert len(trace.losses) == 5
    difference = compare(traces(**keys_of(kind)), trace)
    assert difference.largest <= BAR, difference


# What changes no sum is held to the same bar: checkpointing, and code that is only traced.
TECHNIQUES = [
    ({}, {"ac": FullCheckpointing()}, True),
    ({}, {"ac": SelectiveOp(), **COMPILED}, False),
    ({"shard": 2, "tensor": 2}, {"ac": FullCheckpointing(), **COMPILED}, False),
    ({"context": 2, "tensor": 2}, {"ac": SelectiveOp(), **COMPILED}, False),
    ({"pipeline": 2, "tensor": 2, "schedule": "zbv"}, {"ac": SelectiveOp()}, False),
    # Options from outside, in one process and in many.
    ({"pipeline": 2, "shard": 2}, {"ac": FirstBlocks(count=3)}, False),
    ({"shard": 2}, {"ac": FirstBlocks(count=1), **COMPILED}, False),
    ({}, {"precision": Fp64()}, True),
    ({"shard": 2, "context": 2, "tensor": 2}, {"precision": Fp64()}, False),
]


@pytest.mark.parametrize(
    ("layout", "given"),
    [
        pytest.param(layout, given, id=label(f"{i}", layout), marks=[] if always else [pytest.mark.full])
        for i, (layout, given, always) in enumerate(TECHNIQUES)
    ],
)
def test_techniques_change_nothing_but_cost(traces, layout, given):
    difference = compare(traces(**keys_of()), traces(**keys_of(**layout, **given)))
    assert difference.largest <= BAR, difference


# bfloat16 keeps 8 bits: one process in it, eager, is a few thousandths to a hundredth off fp32, by tensor. Four dimensions
# sum the same rounded numbers in other orders, and round some sums once more: half as far again, at the most.
BAND = 1.5


@pytest.mark.full
def test_four_dimensions_with_everything_on(traces):
    layout = {"pipeline": 2, "shard": 2, "context": 2, "tensor": 2}
    exact = traces(**keys_of())
    band = compare(exact, traces(**keys_of(precision=Bf16())))
    difference = compare(exact, traces(**keys_of(**layout, ac=SelectiveOp(), precision=Bf16(), **COMPILED)))
    # The losses' own error is smaller than what a rounding of a single one would be: it is left to luck.
    assert difference.loss <= 2**-9, (difference, band)
    assert difference.gradient[0] <= BAND * band.gradient[0], (difference, band)
    assert difference.parameter[0] <= BAND * band.parameter[0], (difference, band)
    assert difference.grad_norm <= 2**-9, (difference, band)
    print(difference, band, sep="\n")
