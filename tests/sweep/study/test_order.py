"""The order in which runs start: repeats in turns, every second round backwards, the control at equal distances."""

import pytest

from titanlab.sweep.plan import starting_order
from titanlab.sweep.request import control_points, read_control
from titanlab.sweep.space import SweepPoint


def points(recipes, repeats, *, control=False):
    planned = [SweepPoint(values={"ac": recipe}, repeat=repeat) for recipe in recipes for repeat in range(repeats)]
    return [*planned, *(control_points({}, repeats) if control else [])]


def names(planned):
    return "".join(
        "C" if planned[number].is_control else planned[number].values["ac"] for number in starting_order(planned)
    )


@pytest.mark.parametrize(
    ("recipes", "repeats", "expected"),
    [("ab", 1, "ab"), ("ab", 2, "abba"), ("ab", 3, "abbaab"), ("abc", 2, "abccba"), ("a", 3, "aaa"), ("", 1, "")],
)
def test_repeats_start_in_turns(recipes, repeats, expected):
    assert names(points(recipes, repeats)) == expected


@pytest.mark.parametrize(
    ("recipes", "repeats", "expected"),
    [("ab", 3, "CabCbaCabC"), ("ab", 2, "CabCbaC"), ("abcd", 1, "CabCcdC"), ("a", 1, "CCaC"), ("abc", 1, "CaCbcC")],
)
def test_the_control_starts_first_last_and_between(recipes, repeats, expected):
    assert names(points(recipes, repeats, control=True)) == expected


def test_a_swept_repeat_is_a_repeat():
    planned = [SweepPoint(values={"ac": recipe, "repeat": repeat}) for recipe in "ab" for repeat in (0, 1)]
    assert names(planned) == "abba"


def test_recipes_that_have_fewer_repeats_are_left_out_of_later_rounds():
    planned = [SweepPoint(values={"ac": "a"}), SweepPoint(values={"ac": "a"}, repeat=1), SweepPoint(values={"ac": "b"})]
    assert names(planned) == "aba"


def test_every_run_has_one_place():
    planned = points("abcdefg", 5, control=True)
    assert sorted(starting_order(planned)) == list(range(len(planned)))


@pytest.mark.parametrize(("repeats", "count"), [(1, 3), (2, 3), (3, 4), (1000, 1001)])
def test_the_control_runs_before_each_round_and_at_the_end_and_at_least_three_times(repeats, count):
    planned = control_points({"ac": "none"}, repeats)
    # No repeat of a point has a number of these: a sweep has at most 1,000.
    assert [point.repeat for point in planned] == list(range(1000, 1000 + count))
    assert len({point.label for point in planned}) == count


@pytest.mark.parametrize(
    ("given", "expected"), [(None, None), (False, None), (True, {}), ({}, {}), ({"ac": "none"}, {"ac": "none"})]
)
def test_a_control_is_a_mapping(given, expected):
    assert read_control(given) == expected
