"""The control of a sweep: what its file may say, and how often the control runs."""

import pytest

from titanlab.errors import ConfigError
from titanlab.sweep.request import control_points, read_control


@pytest.mark.parametrize(
    ("value", "read"), [(None, None), (False, None), (True, {}), ({}, {}), ({"ac": "none"}, {"ac": "none"})]
)
def test_a_control_is_a_mapping_or_none(value, read):
    assert read_control(value) == read


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("none", "control=none: must be one mapping of keys to values; try control: {}"),
        (0, "control=0: must be one mapping"),
        ([{"ac": "none"}], "control=[{'ac': 'none'}]: must be one mapping"),
        ({1: 2}, "control={1: 2}: must be one mapping"),
        ({"training": {"steps": 3}}, "control=training: {'steps': 3}: takes keys with dots; write training.KEY: VALUE"),
        ({"name": "x"}, "control=name: x: is given by the control itself; leave it out"),
        ({"repeat": 1}, "control=repeat: 1: is given by the control itself; leave it out"),
    ],
)
def test_anything_else_is_refused(value, error):
    with pytest.raises(ConfigError) as refused:
        read_control(value)
    assert str(refused.value).startswith(error)


@pytest.mark.parametrize(("repeats", "count"), [(1, 3), (2, 3), (3, 4), (1000, 1001)])
def test_it_runs_before_each_round_and_at_the_end_and_at_least_three_times(repeats, count):
    points = control_points({"ac": "none"}, repeats)
    assert len(points) == count
    assert all(point.is_control and point.values == {"ac": "none"} for point in points)
    # No repeat of a point has a number of these: a sweep has at most 1,000.
    assert [point.repeat for point in points] == list(range(1000, 1000 + count))
    assert len({point.label for point in points}) == count
