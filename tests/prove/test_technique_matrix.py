"""Precision, activation checkpointing and compilation train the same on every layout.

Every row trains three steps and is held to one process with the same precision that keeps everything and compiles
nothing: losses, gradient norms, the first step's gradients and the final parameters. In fp32 the bar is the layouts'
own, 1e-5. In fewer bits another layout rounds other sums: two runs that round independently are √2 times as far from
each other as one of them is from exact. So the bar is twice the distance of the one-process run from fp32, which the
test measures; a gradient that is summed over the wrong ranks is a hundred times as far. `make test-full` runs every
row and writes docs/techniques.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cover import marks
from tests.prove.technique_rows import ALWAYS, COVERING, ROWS, Row
from titanlab.prove import tolerances
from titanlab.prove.parity import TraceDifference, compare

pytestmark = pytest.mark.on_page
BAR = tolerances.FP32
ROUNDINGS = tolerances.ROUNDINGS
PAGE = Path(__file__).parents[2] / "docs" / "techniques.md"


@pytest.fixture(scope="module")
def found():
    """Differences by row; written to the page where all have been measured."""
    measured: dict[Row, tuple[TraceDifference, TraceDifference | None]] = {}
    yield measured
    if os.environ.get("TITANLAB_WRITE_PARITY") == "1" and len(measured) == len(ROWS):
        PAGE.write_text(page([(row, *measured[row]) for row in ROWS]))


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=marks(row, always=ALWAYS, covering=COVERING)) for row in ROWS]
)
def test_a_combination_trains_as_one_plain_process(traces, found, row):
    trace, reference = (traces(**each.recipe_keys()) for each in (row, Row({}, row.precision)))
    assert len(trace.losses) == 3
    difference, rounding = compare(reference, trace), None
    if row.precision == "fp32":
        assert difference.largest <= BAR, difference
    else:
        rounding = compare(traces(**Row({}, "fp32").recipe_keys()), reference)
        # The run uses the precision of its name: fp32 would not differ at all.
        assert rounding.gradient[0] > 1e-3, rounding
        # One of the two numbers may be small by chance; their maximum is not.
        scalar = max(rounding.loss, rounding.grad_norm)
        assert max(difference.loss, difference.grad_norm) <= ROUNDINGS * scalar, (difference, rounding)
        assert difference.gradient[0] <= ROUNDINGS * rounding.gradient[0], (difference, rounding)
        assert difference.parameter[0] <= ROUNDINGS * rounding.parameter[0], (difference, rounding)
    found[row] = difference, rounding


def test_the_matrix_is_complete():
    assert len(ROWS) >= 30
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {row.ac for row in ROWS} == {"none", "full", "selective_layer", "selective_op", "memory_budget"}
    assert len({row.precision for row in ROWS}) == 7
    assert sum(row.backend == "inductor" for row in ROWS) >= 3
    for axes in ({"shard", "tensor"}, {"pipeline"}, {"context"}):
        used = [row for row in ROWS if {axis for axis, degree in row.layout.degrees().items() if degree > 1} == axes]
        assert {row.precision for row in used} >= {"fp32", "bf16", "fp16", "float8_tensorwise"}
        assert {row.backend for row in used} >= {"", "aot_eager"}


def test_the_page_shows_these_rows():
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "e-" in line]
    assert [[cell.strip() for cell in line.split("|")[1:6]] for line in shown] == [cells(row) for row in ROWS]


def cells(row: Row) -> list[str]:
    return [row.label, row.precision, row.ac, row.backend or "eager", str(row.layout.world)]


def page(rows: list[tuple[Row, TraceDifference, TraceDifference | None]]) -> str:
    lines = [
        "# Parity of techniques",
        "",
        "Every row trains three steps of a four-layer Llama on the CPU and is held to one process with the same precision",
        "that keeps all activations and compiles nothing: the largest relative difference of losses and gradient norms, and",
        "the largest ‖Δ‖/‖reference‖ of a tensor among the first step's gradients and the final parameters. In fp32 the bar",
        "is 1e-5. In fewer bits the bar is twice what is shown as rounding: how far the one-process run in that precision is",
        "from fp32 (two runs that round other sums are √2 of that apart). Float8 is emulated on the CPU.",
        "",
        "Axes: dp_r replicate, dp_s shard, cp context, tp tensor, pp pipeline (1f1b where no schedule is named). Written by",
        "`make test-full`.",
        "",
        "| layout | precision | ac | compile | processes | loss | grad norm | gradient (rounding) | parameter (rounding) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row, difference, rounding in rows:
        numbers = [f"{number:.1e}" for number in (difference.loss, difference.grad_norm)]
        for name in ("gradient", "parameter"):
            of = "" if rounding is None else f" ({getattr(rounding, name)[0]:.1e})"
            numbers.append(f"{getattr(difference, name)[0]:.1e}{of}")
        lines.append(f"| {' | '.join([*cells(row), *numbers])} |")
    return "\n".join(lines) + "\n"
