"""Precision, activation checkpointing and compilation on layouts: rows of the matrix in docs/techniques.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.cover import cover
from tests.prove.parity_rows import SCHEDULES, OnLayout
from titanlab.options import schema_of

# What every row and its reference have in common.
COMMON = {"layers": 4, "steps": 3, "global_batch": 8, "seq_len": 32, "eps": 1e-6, "at_end": False}
AC: dict[str, dict[str, Any]] = {"selective_layer": {"every": 2}, "memory_budget": {"budget": 0.5}}


@dataclass(frozen=True, eq=False)
class Row(OnLayout):
    """One combination.

    Attributes:
        precision, ac: options by name.
        backend: that compiles blocks and loss; empty: nothing is compiled.
    """

    precision: str = "fp32"
    ac: str = "none"
    backend: str = ""

    def options(self) -> list[str]:
        return [*super().options(), f"precision={self.precision}", f"ac={self.ac}", f"compile={self.backend}"]

    @property
    def name(self) -> str:
        return f"{self.label} · {self.precision} · {self.ac} · {self.backend or 'eager'}"

    def recipe_keys(self) -> dict[str, Any]:
        """Keys of `tests.tiny.recipe`."""
        keys = self.keys(COMMON)
        if self.backend:
            keys |= {"blocks": True, "loss": True, "backend": self.backend}
        keys["precision"] = schema_of("precision", self.precision)()
        keys["ac"] = schema_of("ac", self.ac)(**AC.get(self.ac, {}))
        return keys


def _rows(given: Mapping[str, Any], *others: str) -> list[Row]:
    """One row for each of `precision ac backend`."""
    made = []
    for other in others:
        precision, ac, backend = other.split()
        made.append(Row(given, precision, ac, "" if backend == "eager" else backend))
    return made


def _with_every_schedule() -> list[Row]:
    """Rows in which every schedule meets every precision, every policy, every other axis, and blocks that are compiled.

    Compiled by aot_eager: inductor takes longer for each row than all the rest of it, and gets the same graphs. The
    rows of inductor are added below.
    """
    precisions = [
        "fp32",
        "bf16",
        "bf16_full",
        "fp16",
        "float8_tensorwise",
        "float8_rowwise",
        "float8_rowwise_with_gw_hp",
    ]
    policies = ["none", "full", "selective_layer", "selective_op", "memory_budget"]
    axes = ["shard", "tensor", "context", "replicate", "", "", ""]
    rows = []
    for j, schedule in enumerate(["1f1b", *SCHEDULES]):
        for i, precision in enumerate(precisions):
            axis, policy = axes[(i + 2 * j) % len(axes)], policies[(i + j) % len(policies)]
            # A memory budget is applied by the compiler.
            backend = "aot_eager" if policy == "memory_budget" or i == (j + 2) % 7 else ""
            degrees = {"pipeline": 2, axis: 2} if axis else {"pipeline": 2}
            given = {**degrees, "schedule": schedule} if schedule != "1f1b" else degrees
            rows.append(Row(given, precision, policy, backend))
    return rows


FSDP_TP = {"shard": 2, "tensor": 2}
PP = {"pipeline": 2}
CP = {"context": 2}
ROWS = [
    *_rows(
        FSDP_TP,
        "fp32 full eager",
        "fp32 selective_layer eager",
        "fp32 none aot_eager",
        "fp32 full aot_eager",
        "fp32 memory_budget aot_eager",
        "fp32 selective_op inductor",
        "bf16 selective_op aot_eager",
        "bf16 memory_budget inductor",
        "fp16 selective_op eager",
        "bf16_full full aot_eager",
        "float8_tensorwise none aot_eager",
        "float8_rowwise selective_op aot_eager",
        "float8_rowwise_with_gw_hp none eager",
        "fp32 selective_op aot_eager",
        "float8_tensorwise selective_op eager",
    ),
    *_rows(
        PP,
        "fp32 full eager",
        "fp32 selective_op aot_eager",
        "bf16 full aot_eager",
        "fp16 full eager",
        "float8_tensorwise full eager",
        "bf16_full selective_layer inductor",
        "float8_rowwise_with_gw_hp none eager",
        "bf16 selective_op eager",
    ),
    *_rows(
        {"pipeline": 2, "schedule": "zbv"},
        "fp32 selective_op eager",
        "fp32 full aot_eager",
        "float8_rowwise none eager",
    ),
    *_rows({"pipeline": 2, "schedule": "interleaved_1f1b"}, "fp32 memory_budget aot_eager"),
    *_rows({"pipeline": 2, "shard": 2, "schedule": "zbv"}, "bf16 selective_op eager"),
    *_rows(
        CP,
        "fp32 full eager",
        "fp32 selective_op aot_eager",
        "fp32 memory_budget aot_eager",
        "fp32 none inductor",
        "fp16 none eager",
        "bf16_full selective_op eager",
        "float8_tensorwise selective_op aot_eager",
        "float8_rowwise_with_gw_hp full eager",
        "float8_rowwise selective_layer eager",
        "bf16 selective_op aot_eager",
    ),
    *_rows(
        {"replicate": 2},
        "bf16 full aot_eager",
        "fp16 selective_op eager",
        "bf16_full memory_budget inductor",
        "float8_rowwise none aot_eager",
        "float8_rowwise_with_gw_hp none eager",
    ),
    *_rows({"context": 2, "context_method": "all_gather"}, "fp32 selective_op eager"),
    *_rows({"shard": 2, "context": 2}, "bf16 full aot_eager"),
    *_rows({"pipeline": 2, "shard": 2, "tensor": 2}, "fp32 selective_op aot_eager"),
    *_rows({"pipeline": 2, "shard": 2, "context": 2, "tensor": 2}, "bf16 selective_op aot_eager"),
]
_NAMES = {row.name for row in ROWS}
ROWS += [row for row in _with_every_schedule() if row.name not in _NAMES]
COVERING = cover(ROWS, Row.options, always=(), cost=lambda row: row.layout.world)
# Only in `make test-full`: each takes longer than ten others.
ROWS += [Row({"pipeline": 2, "schedule": schedule}, "fp32", "none", "inductor") for schedule in SCHEDULES]
