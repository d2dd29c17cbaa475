"""Precision, activation checkpointing and compilation train the same on every layout.

Every row trains three steps and is held to one process with the same precision that keeps everything and compiles
nothing: losses, gradient norms, the first step's gradients and the final parameters. In fp32 the bar is the layouts'
own, 1e-5. In fewer bits another layout rounds other sums: two runs that round independently are √2 times as far from
each other as one of them is from exact. So the bar is twice the distance of the one-process run from fp32, which the
test measures; a gradient that is summed over the wrong ranks is a hundred times as far. `make test-full` runs every
row and writes docs/techniques.md.
"""

from __future__ import annotations

import pytest

from tests.cover import marks
from tests.prove.pages import Table, columns
from tests.prove.technique_rows import COVERING, ROWS, Row
from titanlab.prove import tolerances
from titanlab.prove.parity import compare

pytestmark = pytest.mark.on_page
TABLE = Table(
    "techniques.md",
    [[row.label, row.precision, row.ac, row.backend or "eager", str(row.layout.world)] for row in ROWS],
)
BAR = tolerances.FP32
ROUNDINGS = tolerances.ROUNDINGS


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=row.name, marks=marks(row, always=(), covering=COVERING))
        for number, row in enumerate(ROWS)
    ],
)
def test_a_combination_trains_as_one_plain_process(traces, number):
    row = ROWS[number]
    trace, reference = (traces(**each.recipe_keys()) for each in (row, Row({}, row.precision)))
    assert len(trace.losses) == 3
    difference = compare(reference, trace)
    cells = columns(difference)
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
        cells[2] += f" ({rounding.gradient[0]:.1e})"
        cells[3] += f" ({rounding.parameter[0]:.1e})"
    TABLE.add(number, cells)


def test_the_matrix_is_complete_and_on_its_page():
    assert len(ROWS) >= 30
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {row.ac for row in ROWS} == {"none", "full", "selective_layer", "selective_op", "memory_budget"}
    assert len({row.precision for row in ROWS}) == 7
    assert sum(row.backend == "inductor" for row in ROWS) >= 3
    for axes in ({"shard", "tensor"}, {"pipeline"}, {"context"}):
        used = [row for row in ROWS if {axis for axis, degree in row.layout.degrees().items() if degree > 1} == axes]
        assert {row.precision for row in used} >= {"fp32", "bf16", "fp16", "float8_tensorwise"}
        assert {row.backend for row in used} >= {"", "aot_eager"}
    TABLE.check()
