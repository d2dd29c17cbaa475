"""The grammar of a space: what points it has, in which order, and what is no space."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.errors import ConfigError
from titanlab.sweep.space import LIMIT, canonical_text, expand, keys_of


@pytest.mark.parametrize(
    ("space", "points"),
    [
        ({"product": {"a": [1, 2], "b": ["x", "y"]}}, ["a1 bx", "a1 by", "a2 bx", "a2 by"]),
        ({"zip": {"a": [1, 2], "b": ["x", "y"]}}, ["a1 bx", "a2 by"]),
        ({"zip": {"a": [1, 1], "b": ["x", "y"]}}, ["a1 bx", "a1 by"]),
        ({"list": [{"a": 1}, {"a": 2, "b": "x"}, {}]}, ["a1", "a2 bx", ""]),
        # Nested: crossed, paired, and one after the other.
        ({"product": [{"zip": {"a": [1, 2], "b": [3, 4]}}, {"c": [5, 6]}]}, ["a1 b3 c5", "a1 b3 c6", "a2 b4 c5", "a2 b4 c6"]),
        ({"product": [{"list": [{"a": 1}, {"b": 2}]}, {"c": [5], "d": [6, 7]}]}, ["a1 c5 d6", "a1 c5 d7", "b2 c5 d6", "b2 c5 d7"]),
        ({"zip": [{"product": {"a": [1, 2], "b": [3]}}, {"c": [5, 6]}]}, ["a1 b3 c5", "a2 b3 c6"]),
        ({"list": [{"product": {"a": [1, 2]}}, {"zip": {"b": [3, 4], "c": [5, 6]}}, {"d": 7}]}, ["a1", "a2", "b3 c5", "b4 c6", "d7"]),
        ({"list": [{"list": [{"a": 1}]}, {"a": 2}]}, ["a1", "a2"]),
        ({"product": {"a": [None, True, 1, 1.0, "1", [1], {"x": 1}]}}, ["aNone", "aTrue", "a1", "a1.0", "a1", "a[1]", "a{'x': 1}"]),
    ],
)  # fmt: skip
def test_the_points_of_a_space(space, points):
    shown = [" ".join(f"{key}{value}" for key, value in point.items()) for point in expand(space)]
    assert shown == points


def test_keys_come_in_their_order():
    assert keys_of(expand({"list": [{"b": 1}, {"a": 1, "b": 2}]})) == ["b", "a"]


@pytest.mark.parametrize(
    ("space", "key", "said"),
    [
        (None, "space", "is no space"),
        ([{"a": 1}], "space", "is no space"),
        ({}, "space", "has no word of a space: product, zip, list"),
        ({"prodct": {"a": [1]}}, "space", "did you mean product?"),
        ({"product": {"a": [1]}, "zip": {"b": [2]}}, "space", "has product and zip beside each other"),
        ({"product": {"a": [1]}, "seed": [2]}, "space", "has product and seed beside each other"),
        ({"product": None}, "space.product", "takes a mapping, or a list of spaces"),
        ({"product": {}}, "space.product", "has no key"),
        ({"list": []}, "space.list", "has no point"),
        ({"product": {"a": []}}, "space.product.a", "has no value"),
        ({"product": {"a": "x"}}, "space.product.a", "must be a list of values; write a: [x]"),
        ({"product": {"a": [1, 2, 1]}}, "space.product.a", "is there twice"),
        ({"product": {3: [1]}}, "space.product", "is no key of a recipe"),
        ({"list": [3]}, "space.list[0]", "is neither a space nor a mapping of keys; write {key: value}"),
        ({"product": ["a"]}, "space.product[0]", "write {key: [values]}"),
        ({"product": [{"a": [1]}, {"a": [2]}]}, "space.product", "a: is set by two parts of one point"[3:]),
        ({"zip": {"a": [1, 2], "b": [1, 2, 3]}}, "space.zip", "pairs a, which has 2 values, with b, which has 3"),
        ({"zip": {"a": [1, 1], "b": [2, 2]}}, "space", "a=1, b=2: is there twice"),
        ({"list": [{"a": 1, "b": 2}, {"b": 2, "a": 1}]}, "space", "is there twice"),
        ({"product": {str(key): list(range(20)) for key in range(4)}}, "space", f"are more points than {LIMIT}"),
        ({"product": {str(key): list(range(1000)) for key in range(60)}}, "space", f"are more points than {LIMIT}"),
    ],
)  # fmt: skip
def test_what_is_no_space(space, key, said):
    with pytest.raises(ConfigError) as error:
        expand(space)
    assert error.value.key == key
    assert said in str(error.value)
    assert "\n" not in str(error.value)


VALUES = st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)


@given(st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1), st.dictionaries(st.sampled_from("xyz"), VALUES))
def test_a_product_is_every_value_with_every_other(first, second):
    both: Any = {"product": [{"product": first}, {"product": second}]} if second else {"product": first}
    joined = {**first, **second}
    expected = [dict(zip(joined, each, strict=True)) for each in itertools.product(*joined.values())]
    assert expand(both) == expected
    assert expand({"product": joined}) == expected
    # One after the other is as many as both together.
    assert len(expand({"list": [{"product": first}, {"list": [{"last": 1}]}]})) == len(expand({"product": first})) + 1


def test_only_one_value_is_the_same():
    values: list[Any] = [1, True, 1.0, "1", None, "null", [1], {"a": 1}]
    assert len({canonical_text(value) for value in values}) == len(values)
    assert canonical_text({"a": 1, "b": 2}) == canonical_text({"b": 2, "a": 1})
