"""Points from which stages drop some: which are left, and which error is raised."""

import pytest

from titanlab.errors import ConfigError
from titanlab.sweep.plan import Sieve, Unfit


def seeds(count):
    return [{"seed": number} for number in range(count)]


def dropping(*numbers, stage="rule", reason="no"):
    """A stage that keeps all points but these, and returns their seeds."""

    def act(point, number):
        if number in numbers:
            raise Unfit(stage, reason)
        return point["seed"]

    return act


def error(key="seed", value=3, rule="does not fit"):
    return ConfigError(key, value, rule, "try 4")


def test_what_a_stage_drops_the_next_one_does_not_see():
    sieve = Sieve(seeds(4), whole=False)
    assert sieve.keep(dropping(1)) == {0: 0, 2: 2, 3: 3}
    assert list(sieve) == [0, 2, 3]
    assert sieve.keep(dropping(1, 3)) == {0: 0, 2: 2}
    assert {number: unfit.stage for number, unfit in sieve.dropped.items()} == {1: "rule", 3: "rule"}


@pytest.mark.parametrize("whole", [False, True])
def test_a_reason_in_words_drops_a_point(whole):
    assert Sieve(seeds(2), whole=whole).keep(dropping(0, stage="where")) == {1: 1}


def test_of_what_must_be_whole_an_error_is_raised():
    with pytest.raises(ConfigError) as raised:
        Sieve(seeds(3), whole=True).keep(dropping(1, reason=error()))
    assert str(raised.value) == "seed=3: does not fit; try 4"


def test_another_error_of_a_stage_is_none_of_the_sieves():
    def broken(point, number):
        raise KeyError("x")

    with pytest.raises(KeyError):
        Sieve(seeds(1), whole=False).keep(broken)


def left(sieve, stage):
    with pytest.raises(ConfigError) as raised:
        sieve.keep(stage)
    return str(raised.value)


def test_where_all_points_have_one_error_it_is_that():
    assert left(Sieve(seeds(3), whole=False), dropping(0, 1, 2, reason=error())) == "seed=3: does not fit; try 4"


def test_where_no_point_meets_a_condition_it_is_named():
    said = left(Sieve(seeds(3), whole=False), dropping(0, 1, 2, stage="where", reason="seed > 5"))
    assert said == "where=seed > 5: is met by none of 3 points; ask for less"


def test_of_several_reasons_the_most_frequent_is_told():
    sieve = Sieve([{"seed": number, "world": 1} for number in range(3)], whole=False)
    sieve.keep(dropping(0, stage="where", reason="seed > 0"))
    assert left(sieve, dropping(1, 2, reason=error())) == (
        "space=seed,world: none of 3 points can be run; 2 of them for one reason (rule: seed=3: does not fit; try 4); "
        "change that, or sweep other values"
    )


@pytest.mark.parametrize(("count", "asked"), [(0, 0), (1, 0), (8, 0), (9, 10)])
def test_of_few_points_none_is_looked_at_beforehand(count, asked):
    points = []

    def stage(point):
        points.append(point)
        raise Unfit("rule", error("world"))

    sieve = Sieve(seeds(count), whole=False)
    if asked:
        with pytest.raises(ConfigError, match="world=3: does not fit"):
            sieve.check_shared(stage)
        # The first, others up to the last, and the recipe alone.
        assert (points[0], points[-2], points[-1]) == ({"seed": 0}, {"seed": count - 1}, {})
    else:
        sieve.check_shared(stage)
    assert len(points) == asked
    assert sieve.dropped == {}


def test_a_first_point_that_fits_ends_the_look():
    asked = []
    Sieve(seeds(30), whole=False).check_shared(asked.append)
    assert asked == [{"seed": 0}]


def test_a_reason_in_words_is_no_shared_mistake():
    def stage(point):
        raise Unfit("where", "seed > 30")

    Sieve(seeds(30), whole=False).check_shared(stage)


@pytest.mark.parametrize(
    ("key", "words", "fits"),
    [
        # The recipe without any point is as it should be: it is the points' own.
        ("world", lambda point: "does not fit", [{}]),
        # Each is told with its own value.
        ("world", lambda point: f"does not fit {point.get('seed')}", []),
        # It is what is swept that does not fit, in whatever words.
        ("seed", lambda point: "does not fit", []),
        ("world", lambda point: "does not fit", [{"seed": 0}]),
    ],
)
def test_what_may_be_some_points_mistake_is_not_taken_for_one_that_all_share(key, words, fits):
    asked = []

    def stage(point):
        asked.append(point)
        if point not in fits:
            raise Unfit("rule", ConfigError(key, 3, words(point), "try 4"))

    Sieve([{"seed": number} for number in range(30)], whole=False).check_shared(stage)
    # It has looked, and has ended nothing.
    assert {"seed": 0} in asked
