"""The line that says where a run stands, on a terminal and in a log."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from titanlab.system import Progress
from titanlab.system.progress import COLOURS, PLAIN, bar, kept_line, live_line, plain_line, sparkline

FULL = Progress(
    step=20,
    steps=300,
    loss=7.21344,
    grad_norm=1.23456,
    learning_rate=3e-4,
    tokens_per_second=18432.4,
    mfu_percent=41.23,
    step_seconds=0.0278,
    data_seconds=0.00028,
    memory_gib=1.214,
    seconds_left=125.0,
)
SEQUENCE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NUMBERS = st.none() | st.floats(allow_nan=True, allow_infinity=True)
PROGRESS = st.builds(
    Progress,
    step=st.integers(0, 10**6),
    steps=st.integers(0, 10**6),
    loss=NUMBERS,
    grad_norm=NUMBERS,
    learning_rate=NUMBERS,
    tokens_per_second=NUMBERS,
    devices=st.integers(1, 512),
    mfu_percent=NUMBERS,
    step_seconds=NUMBERS,
    data_seconds=NUMBERS,
    memory_gib=NUMBERS,
    seconds_left=NUMBERS,
    warming_up=st.booleans(),
)


def test_a_line_of_a_log_has_every_figure_with_its_unit():
    assert plain_line(FULL) == (
        "step  20/300  loss 7.2134  grad 1.235  lr 3.00e-04  18,432 tok/s  MFU 41.2%  27.8 ms/step  data 1.0%  1.21 GiB  2:05 left"
    )  # fmt: skip


def test_what_is_not_known_is_not_shown():
    assert plain_line(Progress(step=1, steps=9)) == "step 1/9"
    assert plain_line(Progress(step=1, steps=9, loss=float("nan"), warming_up=True)) == "step 1/9  loss nan  (warm-up)"


LONG = replace(FULL, step=12_000, steps=100_000, devices=64, memory_gib=71.234, seconds_left=45_296.0, loss=2.34567)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (118, " 12000/100000  loss 2.3457  grad 1.235  lr 3.00e-04  18,432 tok/s/device  MFU 41.2%  71.23 GiB  12:34:56 left"),
        (103, " 12000/100000  loss 2.346  grad 1.23  lr 3e-4  18.4K tok/s  MFU 41%  71.2G  12:34:56"),
        (80, " 12000/100000 loss 2.346 grad 1.23 lr 3e-4 18.4K tok/s MFU 41% 71.2G 12:34:56"),
    ],
)  # fmt: skip
def test_eighty_columns_have_every_number_with_fewer_digits(columns, shown):
    assert live_line(LONG, [3.0, 2.0, 1.0], columns=columns) == shown
    assert kept_line(LONG, columns=columns) == shown
    assert kept_line(LONG, columns=160) == plain_line(LONG)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (70, " 20/300 loss 7.213 grad 1.23 lr 3e-4 18.4K tok/s MFU 41% 1.21G 2:05"),
        (60, " 20/300 loss 7.213 grad 1.23 18.4K tok/s MFU 41% 2:05"),
        (50, " 20/300 loss 7.213 18.4K tok/s MFU 41% 2:05"),
        (40, " 20/300 loss 7.213 18.4K tok/s 2:05"),
        (30, " 20/300 loss 7.213 2:05"),
        (20, " 20/300 loss 7.213"),
        (10, " 20/300"),
        (5, ""),
    ],
)
def test_a_narrow_terminal_loses_the_least_important_first(columns, shown):
    assert live_line(FULL, [3.0, 2.0, 1.0], columns=columns) == shown


@given(PROGRESS, st.lists(st.floats(allow_nan=True), max_size=20), st.integers(1, 200), st.booleans(), st.booleans())
def test_the_line_never_reaches_the_last_column(progress, losses, columns, coloured, unicode):
    style = COLOURS if coloured else PLAIN
    line = live_line(progress, losses, columns=columns, style=style, unicode=unicode)
    bare = SEQUENCE.sub("", line)
    assert len(bare) < columns
    assert "\n" not in line
    assert coloured or bare == line
    assert unicode or line.isascii()
    # Colours end where they begin.
    assert line.count("\x1b[0m") == len(SEQUENCE.findall(line)) / 2


@pytest.mark.parametrize(
    ("step", "steps", "expected"),
    [
        (0, 10, "┄" * 10),
        (5, 10, "━" * 5 + "┄" * 5),
        (10, 10, "━" * 10),
        (1, 20, "╸" + "┄" * 9),
        (9, 0, "┄" * 10),
        (99, 10, "━" * 10),
    ],
)
def test_bars(step, steps, expected):
    assert bar(step, steps, 10) == expected


def test_the_curve_of_the_loss():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5]) == "▁▁▁"
    assert sparkline([1, float("nan"), 2]) == "▁ █"
    assert sparkline([1, float("nan"), 1]) == "▁ ▁"
    assert sparkline([float("inf")]) == " "
    assert len(sparkline(range(100))) == 12
    assert len(sparkline([0.0, 5e-324, 1.7e308, -1.7e308])) == 4
