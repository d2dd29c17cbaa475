"""A ranking in words: figures, the sentence, the notes, and the lines of the table."""

import math

import pytest

from tests.sweep.table.plain import row
from titanlab.sweep import notes_of, rank, ranking_lines, sentence_of
from titanlab.sweep.ranking import Drift, amount, drift_line, figure, percent


def repeated(recipe, *speeds, **given):
    return [row(recipe, speed, **given) for speed in speeds]


@pytest.mark.parametrize(
    ("value", "by", "text", "whole"),
    [
        (1234.4, "tps", "1,234", "1,234 tokens/s per device"),
        (100.0, "tps", "100", "100 tokens/s per device"),
        (99.96, "tps", "100", "100 tokens/s per device"),
        (12.345, "tps", "12.3", "12.3 tokens/s per device"),
        (0.5, "tps", "0.5", "0.5 tokens/s per device"),
        (41.46, "mfu", "41.5%", "41.5% MFU"),
        (0.754, "memory", "0.75", "0.75 GiB"),
    ],
)
def test_figures_have_the_digits_that_one_can_compare(value, by, text, whole):
    assert figure(value, by) == text
    assert amount(value, by) == whole


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


TABLE = [
    *repeated("dp_s2", 1000.0, 1000.0),
    *repeated("tp2", 900.0, 900.0),
    row("cp2", outcome="oom", speed=None),
]


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
    ("by", "words"),
    [
        ("tps", "dp_s2 was the fastest (1,000 tokens/s per device, 100.0% more than tp2)"),
        ("mfu", "dp_s2 had the highest MFU (40.0% MFU, 100.0% more than tp2)"),
        ("memory", "dp_s2 needed the least memory (1.00 GiB, 50.0% less than tp2)"),
    ],
)
def test_without_repeats_the_sentence_names_nobody(by, words):
    rows = [row(), row("tp2", 500.0, mfu_percent=20.0, memory_gib=2.0)]
    assert sentence_of(rank(rows, by=by)) == (
        f"No winner can be named: {words}, but no recipe was run twice, so that the noise is unknown."
    )


@pytest.mark.parametrize(
    ("by", "begin"),
    [
        ("tps", "dp_s2 is the fastest: 1,000 tokens/s per device, 100.0% more than tp2 (95%"),
        ("mfu", "dp_s2 has the highest MFU: 40.0% MFU, 100.0% more than tp2 (95%"),
        ("memory", "dp_s2 needs the least memory: 1.00 GiB, 50.0% less than tp2 (95%"),
    ],
)
def test_a_winner_is_named_with_its_figure_and_its_gap(by, begin):
    slow = {"mfu_percent": 20.0, "memory_gib": 2.0}
    rows = [*repeated("dp_s2", 1000.0, 1000.0), *repeated("tp2", 500.0, 500.0, **slow)]
    assert sentence_of(rank(rows, by=by)).startswith(begin)


def test_many_recipes_within_noise_are_counted():
    noisy = [1000.0, 1200.0, 800.0]
    rows = [*repeated("dp_s2", *noisy), *repeated("tp2", *(0.99 * speed for speed in noisy))]
    rows += repeated("cp2", *(0.98 * speed for speed in noisy))
    assert sentence_of(rank(rows)).startswith("No winner can be named: all 3 recipes are within noise of the best")


@pytest.mark.parametrize(
    ("rows", "by", "limit", "sentence"),
    [
        ([row(outcome="oom")], "tps", None, "There is nothing to rank: none of 1 run is done."),
        ([row(memory_gib=9.0), row("tp2", memory_gib=7.25)], "tps", 7.0,
         "No recipe fits into 7 GiB: the smallest needs 7.25."),
        ([row(oversubscribed=True)], "mfu", None,
         ("No recipe can be ranked by MFU: the runs had more processes than cores, so that their speed says nothing; "
          "rank them by memory (--by memory).")),
        ([row(memory_gib=None)], "memory", None, "No recipe can be ranked by memory: its memory was not measured."),
    ],
)  # fmt: skip
def test_why_nobody_has_a_place(rows, by, limit, sentence):
    assert sentence_of(rank(rows, by=by, max_memory_gib=limit)) == sentence


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
    ("drift", "line"),
    [
        ((-16.14, None, 2, 300.0),
         "Drift: the control's MFU went 16.1% down in 5:00 (2 runs); whether that is noise is unknown."),
        ((1.0, (-1.0, 3.0), 3, 60.0),
         "Drift: the control's MFU went 1.0% up in 1:00 (3 runs, 95% interval -1.0% to 3.0%): within noise."),
        ((5.0, (4.0, 6.0), 4, 3600.0),
         ("Drift: the control's MFU went 5.0% up in 1:00:00 (4 runs, 95% interval 4.0% to 6.0%): more than noise: the "
          "machine changed while the sweep ran.")),
    ],
)  # fmt: skip
def test_a_drift_is_a_line(drift, line):
    moved, interval, runs, seconds = drift
    assert drift_line(Drift(percent=moved, interval_percent=interval, runs=runs, seconds=seconds), "mfu") == line


@pytest.mark.parametrize(
    ("rows", "by", "line"),
    [
        ([row()], "tps", "Control: single, 900 tokens/s per device (1 run); dp_s2 does 11.1% more."),
        ([row(memory_gib=0.5)], "memory", "Control: single, 1.00 GiB (1 run); dp_s2 needs 50.0% less."),
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
        ([row(memory_gib=None)], "tps", 80.0, "its memory is unknown, so that it cannot be held against the limit"),
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
