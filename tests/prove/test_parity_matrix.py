"""Every combination of axes trains the same as one process: losses, norms, gradients, parameters.

The bars are the project's, in fp32: 1e-5, relative, for losses and gradient norms of five steps; ‖Δ‖/‖reference‖ ≤
1e-5 for every tensor of the first step's gradients and of the final parameters. The remaining difference comes from
the order in which sums are rounded. `make test-full` runs every row and writes docs/parity.md.
"""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path

import pytest

from tests.cover import marks
from tests.prove.parity_rows import ALWAYS, COVERING, KINDS, ROWS, Row
from titanlab.prove import tolerances
from titanlab.prove.parity import TraceDifference, compare

pytestmark = pytest.mark.on_page
BAR = tolerances.FP32
PAGE = Path(__file__).parents[2] / "docs" / "parity.md"


@pytest.fixture(scope="module")
def found():
    """Differences by row, in the order of the table; written to the page where all have been measured."""
    measured: dict[Row, TraceDifference] = {}
    yield measured
    if os.environ.get("TITANLAB_WRITE_PARITY") == "1" and len(measured) == len(ROWS):
        PAGE.write_text(page([(row, measured[row]) for row in ROWS]))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.kind}: {row.label}", marks=marks(row, always=ALWAYS, covering=COVERING))
        for row in ROWS
    ],
)
def test_a_layout_trains_as_one_process(traces, found, row):
    trace = traces(**row.recipe_keys())
    difference = compare(traces(**row.reference_keys()), trace)
    assert len(trace.losses) == 5
    assert difference.largest <= BAR, difference
    found[row] = difference


def test_the_matrix_is_complete():
    layouts = [row.layout for row in ROWS]
    axes = [{axis for axis, degree in layout.degrees().items() if degree > 1} for layout in layouts]
    for size in (1, 2, 3):
        for wanted in combinations(layouts[0].degrees(), size):
            assert set(wanted) in axes, wanted
    assert sum(layout.world == 16 for layout in layouts) == 2
    assert len(ROWS) >= 40
    assert {row.kind for row in ROWS} == KINDS.keys()
    assert len({(row.kind, row.label) for row in ROWS}) == len(ROWS)


def test_the_page_shows_these_rows():
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "e-" in line]
    assert [line.rpartition(" | ")[0].split(" | ")[:3] for line in shown] == [cells(row) for row in ROWS]


def cells(row: Row) -> list[str]:
    return [f"| {row.kind}", row.label, str(row.layout.world)]


def page(rows: list[tuple[Row, TraceDifference]]) -> str:
    lines = [
        "# Parity of layouts",
        "",
        "Every row trains five steps of a four-layer Llama on the CPU and is held to one process with the same seed and",
        "data, in fp32: the largest relative difference of losses and gradient norms over the steps, and the largest",
        "‖Δ‖/‖reference‖ of a tensor among the first step's gradients and the final parameters. The bar for each is",
        "1e-5. What is left is the rounding of sums in another order; parameters show it more, since Adam divides by the",
        "gradient's own size (its eps is 1e-6 here, so that gradients that are nothing but rounding do not move parameters).",
        "",
        "Axes: dp_r replicate, dp_s shard, cp context, tp tensor, pp pipeline (1f1b where no schedule is named). Written by",
        "`make test-full`.",
        "",
        "| case | layout | processes | loss | grad norm | gradient | parameter |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, difference in rows:
        numbers = (difference.loss, difference.grad_norm, difference.gradient[0], difference.parameter[0])
        lines.append(" | ".join([*cells(row), *(f"{number:.1e}" for number in numbers)]) + " |")
    return "\n".join(lines) + "\n"
