"""Every combination of axes trains the same as one process: losses, norms, gradients, parameters.

The bars are the project's, in fp32: 1e-5, relative, for losses and gradient norms of five steps; ‖Δ‖/‖reference‖ ≤
1e-5 for every tensor of the first step's gradients and of the final parameters. The remaining difference comes from
the order in which sums are rounded. `make test-full` runs every row and writes docs/parity.md.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.cover import marks
from tests.prove.pages import Table, columns
from tests.prove.parity_rows import ALWAYS, COVERING, KINDS, ROWS
from titanlab.prove import tolerances
from titanlab.prove.parity import compare

pytestmark = pytest.mark.on_page
TABLE = Table("parity.md", [[row.kind, row.label, str(row.layout.world)] for row in ROWS])
BAR = tolerances.FP32


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=f"{row.kind}: {row.label}", marks=marks(row, always=ALWAYS, covering=COVERING))
        for number, row in enumerate(ROWS)
    ],
)
def test_a_layout_trains_as_one_process(traces, number):
    row = ROWS[number]
    trace = traces(**row.recipe_keys())
    difference = compare(traces(**row.reference_keys()), trace)
    assert len(trace.losses) == 5
    assert difference.largest <= BAR, difference
    TABLE.add(number, columns(difference))


def test_the_matrix_is_complete_and_on_its_page():
    layouts = [row.layout for row in ROWS]
    axes = [{axis for axis, degree in layout.degrees().items() if degree > 1} for layout in layouts]
    for size in (1, 2, 3):
        for wanted in combinations(layouts[0].degrees(), size):
            assert set(wanted) in axes, wanted
    assert sum(layout.world == 16 for layout in layouts) == 2
    assert len(ROWS) >= 40
    assert {row.kind for row in ROWS} == KINDS.keys()
    assert len({(row.kind, row.label) for row in ROWS}) == len(ROWS)
    TABLE.check()
