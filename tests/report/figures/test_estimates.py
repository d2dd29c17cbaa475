"""Estimates against measurements."""

from tests.report.sweeps import mixed
from titanlab.report.figures.scatter import compared, estimate_against_measurement
from titanlab.sweep import SweepTable


def test_a_point_for_each_run_that_has_both(made):
    rows = SweepTable(mixed(made).folder).rows()
    for row in rows:
        if row["outcome"] == "done":
            row["estimate.step_seconds"] = row["step_seconds"] * 1.1
    rows[0]["estimate.memory_gib"] = 2 * rows[0]["memory_gib"]
    assert len(compared(rows, "step_seconds", "estimate.step_seconds")) == 10
    figure = estimate_against_measurement(rows)
    texts = [mark.text for mark in figure.marks.values()]
    assert sum("(+10 %)" in text for text in texts) == 10
    assert sum("(+100 %)" in text for text in texts) == 1
    assert {axis.get_xlabel() for axis in figure.axes} == {"estimate (s)", "estimate (GiB)"}
    # Hollow where more processes than cores took turns.
    assert figure.legends


def test_values_of_very_different_sizes_have_logarithmic_axes(made):
    rows = [
        {"run": f"r{size}", "outcome": "done", "oversubscribed": False, "step_seconds": size, "memory_gib": 0.0}
        for size in (0.01, 10.0)
    ]
    rows = [{**row, "estimate.step_seconds": row["step_seconds"], "estimate.memory_gib": 1.0} for row in rows]
    figure = estimate_against_measurement(rows)
    assert [axis.get_xscale() for axis in figure.axes] == ["log", "linear"]
    # No memory was measured.
    assert [text.get_text() for text in figure.axes[1].texts] == ["no run has both"]
