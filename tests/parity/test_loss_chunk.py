"""The head and the loss in chunks train as whole logits do, on every layout.

Every row is held to one process with whole logits: losses, gradient norms, the first step's gradients and the final
parameters, within 1e-5 in fp32. A process has at least two chunks of a microbatch, the last one mostly smaller.
docs/loss-in-chunks.md shows the rows that CI does not always run too; `make test-matrix` writes it.
"""

from __future__ import annotations

import os

import pytest

from tests import tiny
from tests.parity.parity_rows import COMMON, OnLayout
from tests.planted_schema import Planted
from titanlab.distributed.ranks import ALONE, joined
from titanlab.parity import parity, tolerances
from titanlab.parity.parity import compare

BAR = tolerances.FP32
MATRIX = [pytest.mark.matrix]
# What a row and its reference have in common.
KINDS = {
    "plain": {},
    "tied": {"tied_embeddings": True},
    "gaps": {"data": Planted(gaps=True)},
    "uneven": {"vocab_size": 257},
    "validated": {"validate_every": 2, "validation_sequences": 5},
}
EAGER = {"compile": "aot_eager"}
ROWS = [
    ("plain", {}, []),
    ("tied", {"shard": 2}, []),
    ("gaps", {"replicate": 2, "microbatch": 2}, []),
    ("uneven", {"tensor": 2}, []),
    ("plain", {"pipeline": 2, "schedule": "zbv"}, []),
    ("plain", {"context": 2}, MATRIX),
    ("plain", {"tensor": 2, "sequence_parallel": False}, MATRIX),
    ("plain", {"pipeline": 2}, MATRIX),
    ("gaps", {"pipeline": 2, "shard": 2, "schedule": "gpipe"}, MATRIX),
    ("plain", {"pipeline": 2, "schedule": "interleaved_1f1b"}, MATRIX),
    ("plain", {"pipeline": 2, "schedule": "looped_bfs"}, MATRIX),
    ("plain", {"pipeline": 2, "shard": 2, "schedule": "interleaved_zero_bubble"}, MATRIX),
    ("plain", {"pipeline": 2, "schedule": "dualpipe_v"}, MATRIX),
    ("plain", {"pipeline": 2, "tensor": 2, "schedule": "zbv"}, MATRIX),
    ("plain", {"replicate": 2, "shard": 2}, MATRIX),
    ("tied", {"shard": 2, "tensor": 2}, MATRIX),
    ("plain", {"shard": 2, "microbatch": 1, "reshard_after_forward": "never"}, MATRIX),
    ("plain", {"shard": 2, "cpu_offload": True}, MATRIX),
    ("gaps", {"context": 2, "tensor": 2}, MATRIX),
    ("plain", {"pipeline": 2, "shard": 2, "context": 2, "tensor": 2}, MATRIX),
    ("plain", {"blocks": True, "loss": True, "backend": "aot_eager"}, MATRIX),
    ("uneven", {"shard": 2, "tensor": 2, "loss": True, "backend": "aot_eager"}, MATRIX),
    ("plain", {"pipeline": 2, "loss": True, "backend": "inductor"}, MATRIX),
]
"""Rows: what they have in common with the reference, the layout, marks."""


def label(kind, given):
    return f"{kind}, {OnLayout(given).label}"


def keys(kind, given):
    return {**OnLayout(given).keys(COMMON), **KINDS[kind]}


def traced(made, run):
    return parity.trace(made, run, joined(os.environ) or ALONE)


@pytest.fixture(scope="module")
def references(pool, tmp_path_factory):
    known = {}

    def reference(kind):
        if kind not in known:
            made = tiny.recipe(tmp_path_factory.mktemp("reference"), **keys(kind, {}))
            assert made.loss_chunk == 0
            known[kind] = pool.run(1, traced, made, tiny.begin(made))[0]
        return known[kind]

    return reference


@pytest.mark.parametrize(
    ("kind", "given"), [pytest.param(kind, given, marks=marks, id=label(kind, given)) for kind, given, marks in ROWS]
)
def test_chunks_train_as_whole_logits(pool, references, tmp_path, kind, given):
    made = tiny.recipe(tmp_path, **keys(kind, given), loss_chunk=12)
    tokens = made.microbatch * made.training.seq_len // made.layout.context
    assert made.loss_chunk * 2 <= tokens
    found = pool.run(made.world, traced, made, tiny.begin(made), limit_seconds=300)
    assert all(each.losses == found[0].losses for each in found)
    difference = compare(references(kind), found[0])
    assert difference.largest <= BAR, difference
    print(f"| {label(kind, given)} | {difference}")
