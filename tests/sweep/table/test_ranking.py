"""The ranking of recipes: who is named, how often by chance, and what is said when nobody can be."""

import math
import random

import pytest

from titanlab.sweep.table.columns import NAMES
from titanlab.sweep.table.ranking import rank

# Noise of a run: the standard deviation of the logarithm of tokens/s.
NOISE = 0.03


def row(recipe, speed, **given):
    values = {"state": "ended", "outcome": "done", "layout.label": recipe, "world": 2, "oversubscribed": False}
    figures = {"tokens_per_second": speed, "memory_gib": 1.0, "mfu_percent": 40.0, "started": 0.0}
    return {**dict.fromkeys(NAMES), **values, **figures, **given}


def simulated(rng, recipes, *, repeats=3, noise=NOISE, slower=0.0):
    """Rows of recipes that are all equal, but for the first if the others are slower."""
    speeds = [1000.0, *[1000.0 * (1 - slower)] * (recipes - 1)]
    return [
        row(f"dp_s{number}", speed * math.exp(rng.gauss(0.0, noise)))
        for _ in range(repeats)
        for number, speed in enumerate(speeds, 1)
    ]


@pytest.mark.parametrize(("recipes", "sweeps"), [(2, 2000), (3, 500), (6, 500), (12, 200), (40, 50)])
def test_a_winner_among_equal_recipes_is_named_in_at_most_one_of_twenty_sweeps(recipes, sweeps):
    rng = random.Random(recipes)
    named = sum(rank(simulated(rng, recipes)).winner is not None for _ in range(sweeps))
    assert named / sweeps <= 0.05


@pytest.mark.parametrize("recipes", [2, 6, 12])
def test_recipes_that_are_a_fifth_slower_are_found(recipes):
    rng = random.Random(recipes)
    winners = [rank(simulated(rng, recipes, slower=0.2)).winner for _ in range(300)]
    assert sum(winner is not None and winner.label == "dp_s1" for winner in winners) / 300 >= 0.95


def test_the_interval_of_the_gap_holds_the_true_gap():
    rng, held = random.Random(0), 0
    for _ in range(1000):
        interval = rank(simulated(rng, 2, slower=0.2)).interval_percent
        held += interval is not None and interval[0] <= 25.0 <= interval[1]
    assert held / 1000 >= 0.95


def test_one_clear_winner_is_named_with_the_gap_and_its_interval():
    speeds = {"dp_s2": (1000.0, 1010.0, 990.0), "tp2": (800.0, 810.0, 790.0), "cp2": (700.0, 705.0, 695.0)}
    ranking = rank([row(recipe, speed) for recipe, each in speeds.items() for speed in each])
    assert [entry.label for entry in ranking.entries] == ["dp_s2", "tp2", "cp2"]
    assert ranking.winner is ranking.first
    assert ranking.runner_up.label == "tp2"
    assert ranking.gap_percent == pytest.approx(25.0, abs=0.1)
    low, high = ranking.interval_percent
    assert 20 < low < 25 < high < 30
    assert (ranking.is_within_noise, ranking.degrees) == (False, 6)
    assert ranking.noise_percent == pytest.approx(1.0, abs=0.1)
    assert ranking.sentence == (
        "dp_s2 is the fastest: 1,000 tokens/s per device, 25.0% more than tp2 "
        f"(95% interval {low:.1f}% to {high:.1f}%)."
    )


def test_without_repeats_nobody_is_named():
    ranking = rank([row("dp_s2", 1000.0), row("tp2", 500.0)])
    assert (ranking.winner, ranking.is_within_noise, ranking.noise_percent) == (None, None, None)
    assert (ranking.interval_percent, ranking.gap_percent) == (None, pytest.approx(100.0))
    assert "no recipe was run twice, so that the noise is unknown" in ranking.sentence
