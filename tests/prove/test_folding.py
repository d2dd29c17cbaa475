"""Folded layouts are small, and together have every axis of the real one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.costs import AXES, Layout
from titanlab.errors import ConfigError
from titanlab.prove.reduction import fold_label, folded, missing_axes


def test_a_small_layout_stays_as_it_is():
    for layout in (Layout(), Layout(shard=3, tensor=4), Layout(pipeline=16)):
        assert folded(layout) == [layout]


def test_every_axis_of_a_large_layout_keeps_a_degree_of_two():
    assert folded(Layout(shard=8, tensor=8, pipeline=8)) == [Layout(shard=2, tensor=2, pipeline=2)]
    assert folded(Layout(shard=512)) == [Layout(shard=2)]
    assert fold_label(Layout(shard=2), Layout(shard=512)) == "dp_s2 of dp_s512"
    assert fold_label(Layout(shard=2), Layout(shard=2)) == "dp_s2"


def test_axes_that_do_not_fit_together_get_a_second_layout():
    real = Layout(replicate=2, shard=4, context=2, tensor=8, pipeline=4)
    first, second = folded(real)
    assert first == Layout(pipeline=2, tensor=2, context=2, shard=2)
    assert missing_axes(first, real) == ["dp_r"]
    assert second == Layout(replicate=2, pipeline=2, tensor=2, context=2)
    assert [layout.world for layout in folded(real, most=4)] == [4, 4, 4]


def test_a_degree_that_cannot_be_changed_stays():
    fixed = {"pipeline": "schedule=csv is a file for so many ranks"}
    assert folded(Layout(pipeline=8, shard=4, tensor=4), fixed=fixed) == [
        Layout(pipeline=8, tensor=2),
        Layout(pipeline=8, shard=2),
    ]
    with pytest.raises(ConfigError, match="pipeline=32: cannot be folded to 16 processes: schedule=csv is a file"):
        folded(Layout(pipeline=32), fixed=fixed)
    with pytest.raises(ConfigError, match="pipeline=2: cannot be folded to 1 processes"):
        folded(Layout(pipeline=2), most=1)


@given(st.fixed_dictionaries({axis: st.integers(1, 9) for axis in AXES}), st.integers(2, 40))
def test_folded_layouts_cover_all_axes_within_the_limit(degrees, most):
    real = Layout(**degrees)
    layouts = folded(real, most=most)
    assert all(layout.world <= most for layout in layouts)
    assert all(getattr(layout, axis) <= degrees[axis] for layout in layouts for axis in AXES)
    for axis, degree in degrees.items():
        assert (degree > 1) == any(getattr(layout, axis) > 1 for layout in layouts)
