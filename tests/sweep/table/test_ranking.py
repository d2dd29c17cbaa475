"""The ranking of recipes: who is named, how often by chance, the drift of the control, and all that in words."""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from tests.sweep.table.plain import row
from titanlab.sweep import notes_of, percent, rank, ranking_lines, sentence_of
from titanlab.sweep.ranking import drift_of

# Noise of a run: the standard deviation of the logarithm of tokens/s. Equal recipes on a shared host of two cores differed
# by 3 to 6 % in quiet minutes, and by 20 to 31 % while seven others computed (AMD EPYC, 2026-11-24).
NOISE = 0.03


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


@pytest.mark.parametrize(("recipes", "noise"), [(2, 0.05), (2, NOISE), (6, NOISE), (12, NOISE)])
def test_recipes_that_are_a_fifth_slower_are_found(recipes, noise):
    rng = random.Random(recipes)
    winners = [rank(simulated(rng, recipes, noise=noise, slower=0.2)).winner for _ in range(300)]
    assert sum(winner is not None and winner.label == "dp_s1" for winner in winners) / 300 >= 0.95


def test_the_interval_of_the_gap_holds_the_true_gap():
    rng, held = random.Random(0), 0
    for _ in range(1000):
        interval = rank(simulated(rng, 2, slower=0.2)).gap.interval_percent
        held += interval is not None and interval[0] <= 25.0 <= interval[1]
    assert held / 1000 >= 0.95


def test_one_clear_winner_is_named_with_the_gap_and_its_interval():
    speeds = {"dp_s2": (1000.0, 1010.0, 990.0), "tp2": (800.0, 810.0, 790.0), "cp2": (700.0, 705.0, 695.0)}
    ranking = rank([row(recipe, speed) for recipe, each in speeds.items() for speed in each])
    assert [entry.label for entry in ranking.entries] == ["dp_s2", "tp2", "cp2"]
    assert ranking.winner is ranking.first
    assert ranking.ranked[1].label == "tp2"
    assert ranking.gap.percent == pytest.approx(25.0, abs=0.1)
    low, high = ranking.gap.interval_percent
    assert 20 < low < 25 < high < 30
    assert (ranking.is_within_noise, ranking.degrees) == (False, 6)
    assert ranking.noise_percent == pytest.approx(1.0, abs=0.1)
    assert sentence_of(ranking) == (
        "dp_s2 is the fastest: 1,000 tokens/s per device, 25.0% more than tp2 "
        f"(95% interval {low:.1f}% to {high:.1f}%)."
    )


def repeated(recipe, *speeds, **given):
    return [row(recipe, speed, **given) for speed in speeds]


def test_equal_memory_is_0_percent_less():
    assert "(1.00 GiB, 0% less than tp2)" in sentence_of(rank([row(), row("tp2")], by="memory"))


def test_two_equal_recipes_are_within_noise():
    ranking = rank([*repeated("dp_s2", 1000.0, 1040.0, 960.0), *repeated("tp2", 990.0, 1030.0, 955.0)])
    assert (ranking.winner, ranking.is_within_noise, ranking.first.label) == (None, True, "dp_s2")
    assert ranking.gap.interval_percent[0] < 0 < ranking.gap.interval_percent[1]
    assert "No winner can be named: dp_s2 (999 tokens/s per device) and tp2 (991) are within noise" in sentence_of(
        ranking
    )
    assert [entry.is_within_noise for entry in ranking.ranked] == [True, True]


def test_a_recipe_with_one_run_may_still_be_as_good_as_the_first():
    rows = [*repeated("dp_s2", 1000.0, 1010.0, 990.0), *repeated("tp2", 972.0, 973.0, 971.0), row("cp2", 971.0)]
    ranking = rank(rows)
    assert [entry.is_within_noise for entry in ranking.ranked] == [True, False, True]
    assert ranking.winner is None
    assert "2 of 3 recipes are within noise of the best figure" in sentence_of(ranking)


def test_the_least_memory_is_the_best():
    rows = [*repeated("dp_s2", *[1.0] * 3, memory_gib=50.0), *repeated("tp2", *[1.0] * 3, memory_gib=40.0)]
    ranking = rank(rows, by="memory")
    assert (ranking.winner.label, ranking.gap.percent) == ("tp2", pytest.approx(20.0))
    assert sentence_of(ranking).startswith("tp2 needs the least memory: 40.00 GiB, 20.0% less than dp_s2")


def test_recipes_that_are_level_have_no_winner():
    ranking = rank([*repeated("dp_s2", 5.0, 5.0), *repeated("tp2", 5.0, 5.0), *repeated("cp2", 5.0, 5.0)], by="memory")
    assert ranking.winner is None
    assert sentence_of(ranking) == "No winner can be named: cp2 and 2 other recipes are level at 1.00 GiB."


def test_a_limit_of_memory_leaves_recipes_out_and_says_so():
    rows = [
        *repeated("dp_s2", 1000.0, 1001.0, memory_gib=77.5),
        *repeated("tp2", 900.0, 901.0, memory_gib=70.0),
        *repeated("cp2", 800.0, 801.0, memory_gib=None),
    ]
    ranking = rank(rows, max_memory_gib=76)
    assert [entry.label for entry in ranking.ranked] == ["tp2"]
    reasons = {entry.label: entry.left_out for entry in ranking.left_out}
    assert reasons["dp_s2"] == "needs 77.50 GiB, more than 76"
    assert "unknown" in reasons["cp2"]
    # Runs that do not fit tell of the noise all the same.
    assert ranking.degrees == 3
    assert sentence_of(rank(rows[:4], max_memory_gib=9)) == "No recipe fits into 9 GiB: the smallest needs 70.00."


@pytest.mark.parametrize("value", [None, math.nan, math.inf, 0.0, -1.0])
def test_figures_that_are_none_do_not_count(value):
    ranking = rank([*repeated("dp_s2", 1000.0, value), row("tp2", value)])
    assert [(entry.label, entry.runs) for entry in ranking.ranked] == [("dp_s2", 1)]
    assert ranking.left_out[0].left_out == "its speed was not measured: no step after warm-up"


def test_failures_and_unfinished_runs_are_told():
    failed, waits = {"outcome": "oom", "tokens_per_second": None}, {"state": "queued", "outcome": None}
    rows = [row("dp_s2", 1000.0), row("dp_s2", None, **failed), row("tp2", None, **failed), row("cp2", None, **waits)]
    ranking = rank(rows)
    reasons = {entry.label: entry.left_out for entry in ranking.left_out}
    assert reasons == {"tp2": "no run is done: 1 oom", "cp2": "no run is done: 1 queued"}
    assert "Ranked recipes have runs that failed: 1 oom." in notes_of(ranking)
    assert "The sweep has not ended (1 queued): the answer may change." in notes_of(ranking)
    assert sentence_of(ranking).startswith("Only dp_s2 (1,000 tokens/s per device) can be ranked")
    assert sentence_of(rank(rows[1:])) == "There is nothing to rank: none of 3 runs is done."
    assert sentence_of(rank([])) == "There is nothing to rank: the sweep has no run."


def control(speeds, *, every=100.0):
    return [row("single", speed, control=True, world=1, started=every * number) for number, speed in enumerate(speeds)]


def test_the_control_has_no_place_and_shows_a_drift():
    rows = [*repeated("dp_s2", 1000.0, 1010.0, 990.0), *repeated("tp2", 800.0, 808.0, 792.0)]
    ranking = rank([*rows, *control([900.0, 850.0, 800.0, 755.0])])
    assert [entry.label for entry in ranking.entries] == ["dp_s2", "tp2"]
    assert (ranking.control.label, ranking.control.runs) == ("single", 4)
    assert ranking.control_gap.percent == pytest.approx(21.2, abs=0.5)
    assert ranking.drift.percent == pytest.approx(-16.1, abs=0.5)
    assert ranking.drift.is_within_noise is False
    assert any("down in 5:00" in note and "more than noise" in note for note in notes_of(ranking))
    steady = rank([*rows, *control([900.0, 909.0, 891.0, 900.0])])
    assert steady.drift.is_within_noise is True


def test_a_drift_without_any_measure_of_noise_is_told_as_such():
    ranking = rank([row("dp_s2", 1000.0), *control([900.0, 800.0])])
    # The two controls are repeats of each other, but a line goes through any two points.
    assert ranking.drift.is_within_noise is None
    assert any("whether that is noise is unknown" in note for note in notes_of(ranking))


def test_the_values_are_plain():
    rows = [*repeated("dp_s2", 1000.0, 1010.0), *repeated("tp2", 800.0, 808.0), *control([900.0, 901.0, 902.0])]
    values = json.loads(json.dumps(rank(rows).to_mapping()))
    assert (values["winner"], values["runner_up"], values["is_within_noise"]) == ("dp_s2", "tp2", False)
    assert [entry["recipe"] for entry in values["recipes"]] == ["dp_s2", "tp2"]
    assert values["drift"]["runs"] == 3
    first = values["recipes"][0]
    assert (first["layout"], first["runs"], first["ends"], first["is_control"]) == (
        "dp_s2",
        [None] * 2,
        {"done": 2},
        False,
    )
    assert (first["figures"], first["centre"]) == ([1000.0, 1010.0], pytest.approx(1005.0, rel=1e-4))
    assert first["spread_percent"] == pytest.approx(100 * math.log(1.01) / math.sqrt(2))
    assert first["interval"][0] < first["centre"] < first["interval"][1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0%"),
        (12.34, "12.3%"),
        (-3.0, "-3.0%"),
        (0.1, "0.1%"),
        (0.052, "0.05%"),
        (-0.052, "-0.05%"),
        (999.9, "999.9%"),
        (1000.0, "over 1,000%"),
        (math.inf, "over 1,000%"),
    ],
)
def test_small_gaps_keep_a_digit_and_huge_ones_are_only_huge(value, text):
    assert percent(value) == text


TABLE = [*repeated("dp_s2", 1000.0, 1000.0), *repeated("tp2", 900.0, 900.0), row("cp2", outcome="oom", speed=None)]


def test_the_whole_answer_is_lines():
    assert ranking_lines(rank(TABLE)) == [
        "dp_s2 is the fastest: 1,000 tokens/s per device, 11.1% more than tp2 (95% interval 11.1% to 11.1%).",
        "     recipe  processes  runs  tokens/s    MFU   GiB  95% interval    spread  against the first",
        "  1  dp_s2           2     2     1,000  40.0%  1.00  1,000 to 1,000      0%",
        "  2  tp2             2     2       900  40.0%  1.00  900 to 900          0%  -10.0%",
        "Noise: a run differs by 0% (standard deviation, pooled over the repeats of 2 recipes; 2 degrees of freedom).",
        "left out: 1 recipe",
        "  cp2: no run is done: 1 oom",
    ]


def test_speeds_of_oversubscribed_runs_are_marked_where_recipes_are_ranked_by_memory():
    lines = ranking_lines(rank([row(oversubscribed=True), row("tp2", memory_gib=2.0)], by="memory"))
    assert [line.split()[4:7] for line in lines[2:4]] == [["1,000*", "40.0%*", "1.00"], ["1,000", "40.0%", "2.00"]]


@pytest.mark.parametrize(
    ("by", "unnamed", "named"),
    [
        ("tps", "was the fastest (1,000 tokens/s per device, 100.0% more", "is the fastest: 1,000 tokens/s per device, 100.0% more"),
        ("mfu", "had the highest MFU (40.0% MFU, 100.0% more", "has the highest MFU: 40.0% MFU, 100.0% more"),
        ("memory", "needed the least memory (1.00 GiB, 50.0% less", "needs the least memory: 1.00 GiB, 50.0% less"),
    ],
)  # fmt: skip
def test_a_winner_is_named_with_its_figure_and_its_gap_if_recipes_were_run_twice(by, unnamed, named):
    rows = [row(), row("tp2", 500.0, mfu_percent=20.0, memory_gib=2.0)]
    once = rank(rows, by=by)
    assert (once.winner, once.is_within_noise, once.noise_percent, once.gap.interval_percent) == (None,) * 4
    assert sentence_of(once) == (
        f"No winner can be named: dp_s2 {unnamed} than tp2), but no recipe was run twice, so that the noise is unknown."
    )
    assert sentence_of(rank(rows * 2, by=by)).startswith(f"dp_s2 {named} than tp2 (95%")


def test_what_is_compared_unfairly_is_noted():
    rows = [row(layers=2), row("tp4", world=4, layers=4)]
    unfair = [
        (
            "The recipes have different numbers of processes: tokens/s are those of one device. Of all devices "
            "together tp4 · layers 4 has the most: 4,000 tokens/s."
        ),
        "The recipes have different models: compare them by MFU (--by mfu).",
    ]
    unknown = "Noise: unknown, as no recipe has two runs; hydra.sweeper.repeats=3 runs each three times."
    assert notes_of(rank(rows)) == [unknown, *unfair]
    assert notes_of(rank(rows, by="mfu")) == [unknown]


@pytest.mark.parametrize(
    ("rows", "by", "line"),
    [
        ([row()], "tps", "Control: single, 900 tokens/s per device (1 run); dp_s2 does 11.1% more."),
        ([row(memory_gib=0.5)], "memory", "Control: single, 1.00 GiB (1 run); dp_s2 needs 50.0% less."),
        ([row(tokens_per_second=720.0)], "tps", "Control: single, 900 tokens/s per device (1 run); dp_s2 does 20.0% less."),
        ([row(memory_gib=1.5)], "memory", "Control: single, 1.00 GiB (1 run); dp_s2 needs 50.0% more."),
        ([], "tps", "Control: single, 900 tokens/s per device (1 run)."),
        (repeated("dp_s2", 1000.0, 1000.0), "tps",
         ("Control: single, 900 tokens/s per device (1 run); dp_s2 does 11.1% more (95% interval 11.1% to 11.1%), "
          "more than noise.")),
        (repeated("dp_s2", 500.0, 2000.0), "tps",
         ("Control: single, 900 tokens/s per device (1 run); dp_s2 does 11.1% more (95% interval -100.0% to "
          "over 1,000%), within noise.")),
    ],
)  # fmt: skip
def test_the_control_is_told_with_what_the_first_one_gains(rows, by, line):
    control = row("single", 900.0, control=True, world=1)
    assert [note for note in notes_of(rank([*rows, control], by=by)) if note.startswith("Control")] == [line]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"outcome": "oom"}, "no run is done: 1 oom"),
        ({"emulated": True}, "emulated: its products are in 32 bits on this device, so that its speed says nothing"),
    ],
)
def test_a_control_without_a_figure_is_told(given, reason):
    rows = [*repeated("dp_s2", 1000.0, 1010.0), row("single", 900.0, control=True, world=1, **given)]
    ranking = rank(rows)
    assert (ranking.control, ranking.control_left_out) == (None, reason)
    assert f"Control: {reason}. So nothing is known of a drift of the machine." in notes_of(ranking)


def test_recipes_are_not_ranked_by_an_mfu_whose_peak_each_run_measured():
    """51.0 % stood for 3,398 tokens/s and 54.0 % for 2,732: each run had measured another peak."""
    own = "6N FLOPs a token, over {} TFLOP/s (512³ matmul measured on this CPU)"
    rows = [
        row(speed=3398.0, mfu_percent=51.0, mfu_convention=own.format(0.11)),
        row("tp2", speed=2732.0, mfu_percent=54.0, mfu_convention=own.format(0.09)),
    ]
    by_mfu = rank(rows, by="mfu")
    assert (by_mfu.ranked, by_mfu.winner) == ((), None)
    assert sentence_of(by_mfu) == (
        "No recipe can be ranked by MFU: its MFU is a share of a peak that each run measured by itself; rank by tokens/s "
        "(--by tps)."
    )
    assert [entry.label for entry in rank(rows).ranked] == ["dp_s2", "tp2"]
    given = [{**each, "mfu_convention": "6N FLOPs a token, over 0.1 TFLOP/s (cluster.peak_tflops)"} for each in rows]
    assert [entry.label for entry in rank(given, by="mfu").ranked] == ["tp2", "dp_s2"]
    # Nor are different models sent there.
    unequal = [{**each, "layers": layers} for layers, each in enumerate(rows)]
    assert not any("--by mfu" in note for note in notes_of(rank(unequal)))


OVERSUBSCRIBED = "oversubscribed: more processes than cores, so that its speed says nothing"


@pytest.mark.parametrize(
    ("rows", "by", "limit", "reason"),
    [
        ([row(outcome="oom"), row(state="queued", outcome=None)], "tps", None, "no run is done: 1 oom, 1 queued"),
        ([row(memory_gib=None)], "tps", 80.0, "its memory is unknown, so it cannot be compared with the limit"),
        ([row(memory_gib=1.0), row(memory_gib=9.0)], "tps", 8.5, "needs 9.00 GiB, more than 8.5"),
        ([row(memory_gib=80.0)], "tps", 80.0, None),
        ([row(oversubscribed=True)], "mfu", None, OVERSUBSCRIBED),
        ([row(oversubscribed=True)], "memory", None, None),
        ([row(speed=None)], "tps", None, "its speed was not measured: no step after warm-up"),
        ([row(mfu_percent=None)], "mfu", None, "has no MFU: the peak of its device is unknown"),
        ([row(memory_gib=None)], "memory", None, "its memory was not measured"),
        # The limit goes before the rest.
        ([row(memory_gib=9.0, oversubscribed=True)], "tps", 8.0, "needs 9.00 GiB, more than 8"),
    ],
)
def test_a_recipe_without_a_place_says_why(rows, by, limit, reason):
    (entry,) = rank(rows, by=by, max_memory_gib=limit).entries
    assert entry.left_out == reason


def rows(*pairs):
    return [{"started": started, "speed": speed} for started, speed in pairs]


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(0.0, 100.0)],
        [(5.0, 100.0), (5.0, 110.0)],
        [(None, 100.0), (5.0, 110.0)],
        [(0.0, 0.0), (5.0, 110.0)],
        [(0.0, math.nan), (5.0, 110.0)],
    ],
)
def test_without_two_figures_at_two_times_there_is_no_drift(pairs):
    assert drift_of(rows(*pairs), "speed") is None


def test_repeats_of_the_recipes_tell_of_the_noise_of_two_controls():
    wide = drift_of(rows((0.0, 100.0), (30.0, 110.0)), "speed", squares=0.1, degrees=10)
    narrow = drift_of(rows((0.0, 100.0), (30.0, 110.0)), "speed", squares=1e-6, degrees=10)
    assert (wide.is_within_noise, narrow.is_within_noise) == (True, False)
    low, high = narrow.interval_percent
    assert low < 10.0 < high
    # Student's t of 95 % with ten degrees of freedom is 2.228; both ends are half of the time away from the mean.
    half = 2.228 * math.sqrt(1e-6 / 10 / 0.5)
    assert (math.log(high / 100 + 1) - math.log(low / 100 + 1)) / 2 == pytest.approx(half, rel=1e-3)


def test_figures_on_one_line_have_no_noise_in_whatever_order_they_are():
    steady = [(10.0 * place, 100.0 * 1.1**place) for place in range(4)]
    for pairs in (steady, steady[::-1], [steady[2], steady[0], steady[3], steady[1]]):
        drift = drift_of(rows(*pairs), "speed")
        assert drift.percent == pytest.approx(33.1)
        assert drift.interval_percent == pytest.approx((33.1, 33.1), rel=1e-6)
        assert (drift.runs, drift.seconds, drift.is_within_noise) == (4, 30.0, False)


def stacked(*speeds, **given):
    """Rows of a stack: three runs of each step, which differ by a percent."""
    return [
        row(f"step{number}", speed * share, stack_step=number, **given)
        for number, speed in enumerate(speeds)
        for share in (0.99, 1.0, 1.01)
    ]


def test_the_steps_of_a_stack_are_each_compared_with_the_one_before():
    ranking = rank(stacked(1000.0, 1160.0, 1450.0))
    assert [(step.before.label, step.entry.label) for step in ranking.steps] == [("step0", "step1"), ("step1", "step2")]
    assert [step.percent for step in ranking.steps] == pytest.approx([16.0, 25.0])
    assert [step.is_within_noise for step in ranking.steps] == [False, False]
    assert sentence_of(ranking).startswith("step2 is the fastest: ")
    assert "worse" not in sentence_of(ranking)
    lines = ranking_lines(ranking)
    assert "Steps, each against the one before it, from step0:" in lines
    assert any(line.startswith("  step1: +16.0% (95% interval ") for line in lines)
    assert [step["recipe"] for step in ranking.to_mapping()["steps"]] == ["step1", "step2"]


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_a_step_that_is_a_fifth_slower_is_named_in_the_first_sentence(slow):
    speeds = [1000.0, 1160.0, 1300.0, 1500.0]
    speeds[slow] = 0.8 * speeds[slow - 1]
    sentence = sentence_of(rank(stacked(*speeds)))
    assert f"; worse than the step before: step{slow} -20.0% (95% interval " in sentence
    assert sentence.count("step before") == 1


def test_a_step_within_noise_is_no_loss_and_a_failed_one_is_passed_over():
    ranking = rank([*stacked(1000.0, 995.0), *stacked(1200.0)[:1]])
    assert ranking.steps[0].is_within_noise
    assert "step before" not in sentence_of(ranking)
    rows = stacked(1000.0, 1100.0, 1200.0)
    for each in rows[3:6]:
        each["outcome"] = "oom"
    (step,) = rank(rows).steps
    assert (step.before.label, step.entry.label) == ("step0", "step2")


def test_a_step_that_needs_more_memory_has_a_plus_and_is_worse():
    rows = [
        row(f"step{number}", 1000.0 + repeat, stack_step=number, memory_gib=memory * (1 + repeat / 100))
        for number, memory in enumerate((10.0, 12.0, 6.0))
        for repeat in range(3)
    ]
    ranking = rank(rows, by="memory")
    assert [step.gain_text.partition("% (")[0] for step in ranking.steps] == ["+20.0", "-50.0"]
    low, high = re.findall(r"[-\d.]+%", ranking.steps[0].gain_text)[-2:]
    assert 15.0 < float(low.rstrip("%")) < 20.0 < float(high.rstrip("%")) < 25.0
    assert "; worse than the step before: step1 +20.0% (95% interval " in sentence_of(ranking)
    assert [step.is_worse for step in ranking.steps] == [True, False]


def test_the_steps_have_no_wrong_loss_in_nineteen_of_twenty_equal_stacks():
    rng, wrong = random.Random(4), 0
    for _ in range(400):
        rows = [
            row(f"step{number}", 1000.0 * math.exp(rng.gauss(0.0, NOISE)), stack_step=number)
            for number in range(4)
            for _ in range(3)
        ]
        ranking = rank(rows)
        wrong += ranking.winner is not None or any(not step.is_within_noise for step in ranking.steps)
    assert wrong / 400 <= 0.05


def test_emulated_products_get_no_place_by_speed_but_by_memory():
    rows = [*repeated("dp_s2", 1000.0, 1010.0), *repeated("tp2", 9000.0, 9010.0, emulated=True, precision="float8")]
    ranking = rank(rows)
    assert [entry.group.layout for entry in ranking.ranked] == ["dp_s2"]
    (left,) = ranking.left_out
    assert left.left_out.startswith("emulated: ")
    assert len(rank(rows, by="memory").ranked) == 2


def test_repeats_that_the_command_line_gives_are_one_recipe():
    rows = [row("dp_s2", 1000.0 + number, repeat=number, **{"point.repeat": str(number)}) for number in range(3)]
    (entry,) = rank(rows).entries
    assert (entry.label, entry.runs) == ("dp_s2", 3)
