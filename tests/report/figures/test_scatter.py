"""Memory against speed, and estimates against measurements."""

import pytest

from tests.report.sweeps import mixed, summary
from tests.sweep.made import begin, end, train
from titanlab.report.figures.scatter import compared, estimate_against_measurement, front_of, pareto, points_of
from titanlab.sweep import SweepTable


def rows(made):
    return SweepTable(made.folder).rows()


def test_points_are_medians_and_failures_are_crosses(made):
    figure = pareto(rows(mixed(made)))
    by_run = {mark.runs: mark for mark in figure.marks.values()}
    speeds = {mark.text.partition(" ·")[0]: mark.text for mark in by_run.values() if len(mark.runs) == 3}
    assert set(speeds) == {"dp_s2", "tp2", "single"}
    assert "1919 tokens per second of one device, 0.53 GiB" in speeds["dp_s2"]
    crosses = [mark for mark in figure.marks.values() if ": oom" in mark.text]
    assert [mark.columns for mark in crosses] == [("memory_gib", "tokens_per_second", "outcome")]
    unknown = [mark for mark in figure.marks.values() if "unknown memory" in mark.text]
    assert [len(mark.runs) for mark in unknown] == [2]


def test_the_front_has_no_recipe_that_another_one_beats(made):
    front = front_of(points_of(rows(mixed(made)), "tokens_per_second"))
    # The oversubscribed one needs least memory, but its speed says nothing; the single one needs more and is slower.
    assert [point.group.layout for point in front] == ["tp2", "dp_s2"]


def test_a_failure_whose_speed_is_unknown_is_in_the_strip(made):
    table = rows(mixed(made))
    for row in table:
        row["estimate.memory_gib"] = 0.6
    figure = pareto(table)
    strip = figure.axes[1]
    assert [list(line.get_xdata()) for line in strip.lines] == [[0.6], [0.6]]
    estimated = [mark for mark in figure.marks.values() if "by the estimate" in mark.text]
    assert {mark.columns for mark in estimated} == {("estimate.memory_gib", "outcome")}


def test_many_recipes_are_not_all_named(made):
    for number in range(20):
        run = made.run(f"r{number}", seed=number, point={"seed": number})
        begin(run)
        train(run)
        end(run, metrics=summary(1000.0 + 10 * number, 0.3 + 0.01 * (number % 5)))
    figure = pareto(rows(made))
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    front = front_of(points_of(rows(made), "tokens_per_second"))
    assert len(named) == len(front) < 12
    # All of them have their names as texts of their marks.
    assert len(figure.marks) == 20


@pytest.mark.parametrize("filled", [False, True])
def test_without_a_measurement_there_is_a_sentence(made, filled):
    made.write()
    if filled:
        begin(run := made.run("a"))
        end(run, "crash", metrics={})
    figure = pareto(rows(made))
    assert "no run has been measured" in [text.get_text() for text in figure.axes[0].texts]


def test_a_label_is_no_formula(made, tmp_path):
    begin(run := made.run("a", point={"note": r"$\frac{1}{2}$"}))
    train(run)
    end(run)
    begin(other := made.run("b", seed=1, point={"note": "$x"}))
    train(other)
    end(other, metrics=summary(5.0, 0.1))
    figure = pareto(rows(made))
    figure.savefig(tmp_path / "a.png")
    assert any(r"$\frac{1}{2}$".replace("$", r"\$") in text.get_text() for text in figure.legends[0].get_texts())


def test_a_point_for_each_run_that_has_both(made):
    table = rows(mixed(made))
    for row in table:
        if row["outcome"] == "done":
            row["estimate.step_seconds"] = row["step_seconds"] * 1.1
    table[0]["estimate.memory_gib"] = 2 * table[0]["memory_gib"]
    assert len(compared(table, "step_seconds", "estimate.step_seconds")) == 10
    figure = estimate_against_measurement(table)
    texts = [mark.text for mark in figure.marks.values()]
    assert sum("(+10 %)" in text for text in texts) == 10
    assert sum("(+100 %)" in text for text in texts) == 1
    assert {axis.get_xlabel() for axis in figure.axes} == {"estimate (s)", "estimate (GiB)"}
    # Hollow where more processes than cores took turns.
    assert figure.legends


def test_values_of_very_different_sizes_have_logarithmic_axes():
    table = [
        {"run": f"r{size}", "outcome": "done", "oversubscribed": False, "step_seconds": size, "memory_gib": 0.0}
        for size in (0.01, 10.0)
    ]
    table = [{**row, "estimate.step_seconds": row["step_seconds"], "estimate.memory_gib": 1.0} for row in table]
    figure = estimate_against_measurement(table)
    assert [axis.get_xscale() for axis in figure.axes] == ["log", "linear"]
    # No memory was measured.
    assert [text.get_text() for text in figure.axes[1].texts] == ["no run has both"]
