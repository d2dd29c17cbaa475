"""The head and the loss in chunks train as whole logits do, on every layout.

Every row is held to one process with whole logits: losses, gradient norms, the first step's gradients and the final
parameters, within 1e-5 in fp32. A process has at least two chunks of a microbatch, the last one mostly smaller.
docs/loss-in-chunks.md shows the rows of the slower layer too; `make test-full` writes it.
"""

from __future__ import annotations

import pytest

from tests import tiny
from tests.planted_schema import Planted
from tests.prove.pages import Table, columns
from tests.prove.parity_rows import COMMON, OnLayout
from titanlab.prove import tolerances
from titanlab.prove.parity import compare

pytestmark = pytest.mark.on_page
BAR = tolerances.FP32
FULL = [pytest.mark.full]
# What a row and its reference have in common.
KINDS = {
    "plain": {},
    "tied": {"tied_embeddings": True},
    "gaps": {"data": Planted(gaps=True)},
    "uneven": {"vocab_size": 257},
}
ROWS = [
    ("plain", {}, []),
    ("tied", {"shard": 2}, FULL),
    ("gaps", {"replicate": 2, "microbatch": 2}, FULL),
    ("uneven", {"tensor": 2}, []),
    ("plain", {"pipeline": 2, "schedule": "zbv"}, FULL),
    ("plain", {"context": 2}, FULL),
    ("plain", {"tensor": 2, "sequence_parallel": False}, FULL),
    ("plain", {"pipeline": 2}, FULL),
    ("gaps", {"pipeline": 2, "shard": 2, "schedule": "gpipe", "reduce_gradients": "each"}, FULL),
    ("plain", {"pipeline": 2, "schedule": "interleaved_1f1b"}, FULL),
    ("plain", {"pipeline": 2, "schedule": "looped_bfs"}, FULL),
    ("plain", {"pipeline": 2, "shard": 2, "schedule": "interleaved_zero_bubble"}, FULL),
    ("plain", {"pipeline": 2, "schedule": "dualpipe_v"}, FULL),
    ("plain", {"pipeline": 2, "tensor": 2, "schedule": "zbv"}, FULL),
    ("plain", {"replicate": 2, "shard": 2}, FULL),
    ("tied", {"shard": 2, "tensor": 2}, FULL),
    ("plain", {"shard": 2, "microbatch": 1, "reshard_after_forward": "never"}, FULL),
    ("plain", {"shard": 2, "cpu_offload": True}, FULL),
    ("gaps", {"context": 2, "tensor": 2}, FULL),
    ("plain", {"pipeline": 2, "shard": 2, "context": 2, "tensor": 2}, FULL),
    ("plain", {"blocks": True, "loss": True, "backend": "aot_eager"}, FULL),
    ("uneven", {"shard": 2, "tensor": 2, "loss": True, "backend": "aot_eager"}, FULL),
    ("plain", {"pipeline": 2, "loss": True, "backend": "inductor"}, FULL),
]
"""Rows: what they have in common with the reference, the layout, marks."""


TABLE = Table(
    "loss-in-chunks.md",
    [[kind, OnLayout(given).label, str(OnLayout(given).layout.world)] for kind, given, _ in ROWS],
)


def keys(kind, given):
    return {**OnLayout(given).keys(COMMON), **KINDS[kind]}


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=f"{given[0]}, {OnLayout(given[1]).label}", marks=given[2]) for row, given in enumerate(ROWS)],
)
def test_chunks_train_as_whole_logits(traces, tmp_path, row):
    kind, given, _ = ROWS[row]
    # Where a process has 16 tokens of a microbatch, chunks are smaller.
    chunk = 6 if given.get("pipeline", 1) * given.get("context", 1) > 2 else 12
    made = tiny.recipe(tmp_path, **keys(kind, given), loss_chunk=chunk)
    assert made.loss_chunk * 2 <= made.microbatch * made.training.seq_len // made.layout.context
    assert tiny.recipe(tmp_path, **keys(kind, {})).loss_chunk == 0
    difference = compare(traces(**keys(kind, {})), traces(**keys(kind, given), loss_chunk=chunk))
    assert difference.largest <= BAR, difference
    TABLE.add(row, columns(difference))


def test_the_page_shows_these_rows():
    TABLE.check()
