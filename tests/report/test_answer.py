"""The answer of a sweep: the best recipe, and the intervals of all by tokens per second."""

from __future__ import annotations

import pytest

from tests.report.plain import facts_of, run
from tests.sweep.table.plain import row
from titanlab.report.facts import answer_of


def repeated(speeds, recipe="dp_s2", **given):
    return [run(f"{recipe}-{place}", recipe, speed, repeat=place, **given) for place, speed in enumerate(speeds)]


def test_of_nothing_there_is_no_best():
    answer = answer_of(facts_of(), by="tps")
    assert (answer.best, answer.bands) == (None, {})
    assert answer.sentence


def test_the_best_is_that_of_the_figure_and_bands_are_of_the_speed():
    rows = [*repeated([1000.0, 1010.0], memory_gib=3.0), *repeated([500.0, 505.0], "tp_2", memory_gib=1.0)]
    by_speed, by_memory = (answer_of(facts_of(*rows), by=name) for name in ("tps", "memory"))
    assert [answer.best.label for answer in (by_speed, by_memory)] == ["dp_s2", "tp_2"]
    assert by_speed.ranking is by_speed.speeds
    assert by_memory.bands == by_speed.bands
    assert set(by_speed.bands) == {"dp_s2", "tp_2"}
    centres = {entry.label: entry.centre for entry in by_speed.speeds.ranked}
    for label, (low, high) in by_speed.bands.items():
        assert low < centres[label] < high
    # The table, the figures and the ranking have one figure for a recipe.
    assert centres["dp_s2"] == pytest.approx((1000 * 1010) ** 0.5)
    assert by_speed.best.typical("tokens_per_second") == pytest.approx(centres["dp_s2"])


def test_without_repeats_there_is_no_interval():
    answer = answer_of(facts_of(run("a"), run("b", "tp_2", 500.0)), by="tps")
    assert answer.bands == {}


def test_a_recipe_without_the_figure_stands_in_if_one_of_its_runs_is_done():
    failed = row("tp_2", None, run="f", name="f", outcome="oom")
    assert answer_of(facts_of(failed), by="mfu").best is None
    answer = answer_of(facts_of(failed, run("a", mfu_percent=None)), by="mfu")
    assert answer.best is not None
    assert answer.best.label == "dp_s2"


@pytest.mark.parametrize(("speeds", "noise"), [([1000.0, 1000.0], "0 %"), ([100.0, 400.0], "98 %"), ([1.0, 9.0], "%")])
def test_the_noise_is_a_number_that_people_write(speeds, noise):
    text = answer_of(facts_of(*repeated(speeds)), by="tps").band_text
    assert noise in text
    assert "e+" not in text
    assert "(1 degrees of freedom)" not in text
