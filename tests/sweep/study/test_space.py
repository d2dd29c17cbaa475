"""The points of a space, conditions on them, their labels, and the order in which they start."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.errors import ConfigError
from titanlab.records import check_name
from titanlab.sweep.space import (
    LENGTH,
    LIMIT,
    SweepPoint,
    control_points,
    expand,
    read_expression,
    stack_steps,
    starting_order,
)


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


@pytest.mark.parametrize(
    ("space", "key", "said"),
    [
        (None, "space", "is not a space"),
        ([{"a": 1}], "space", "is not a space"),
        ({}, "space", "has no word of a space: product, zip, list, stack"),
        ({"prodct": {"a": [1]}}, "space", "did you mean product?"),
        ({"product": {"a": [1]}, "zip": {"b": [2]}}, "space", "has product and zip side by side"),
        ({"product": {"a": [1]}, "seed": [2]}, "space", "has product and seed side by side"),
        ({"product": None}, "space.product", "takes a mapping, or a list of spaces"),
        ({"product": {}}, "space.product", "has no key"),
        ({"list": []}, "space.list", "has no point"),
        ({"product": {"a": []}}, "space.product.a", "has no value"),
        ({"product": {"a": "x"}}, "space.product.a", "must be a list of values; write a: [x]"),
        ({"product": {"a": [1, 2, 1]}}, "space.product.a", "occurs twice"),
        ({"product": {3: [1]}}, "space.product", "is not a key of a recipe"),
        ({"list": [3]}, "space.list[0]", "is neither a space nor a mapping of keys; write {key: value}"),
        ({"product": ["a"]}, "space.product[0]", "write {key: [values]}"),
        ({"product": [{"a": [1]}, {"a": [2]}]}, "space.product", "a: is set by two parts of one point"[3:]),
        ({"zip": {"a": [1, 2], "b": [1, 2, 3]}}, "space.zip", "pairs a, which has 2 values, with b, which has 3"),
        ({"zip": {"a": [1, 1], "b": [2, 2]}}, "space", "a=1, b=2: occurs twice"),
        ({"list": [{"a": 1, "b": 2}, {"b": 2, "a": 1}]}, "space", "occurs twice"),
        ({"product": {str(key): list(range(20)) for key in range(4)}}, "space", f"are more points than {LIMIT}"),
        ({"product": {str(key): list(range(1000)) for key in range(60)}}, "space", f"are more points than {LIMIT}"),
        ({"zip": {"a": list(range(LIMIT + 1))}}, "space", f"are more points than {LIMIT}"),
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


POINT = {
    "world": 8,
    "parallelism": "fsdp_tp",
    "parallelism.tensor": 2,
    "parallelism.shard": 4,
    "training.seq_len": 4096,
    "training.microbatch": None,
    "training.deterministic": False,
    "precision": "bf16",
    "optimizer.lr": 3e-4,
}


def holds(text: str) -> bool:
    return read_expression(text).holds(POINT.__getitem__, "a point")


@pytest.mark.parametrize(
    "text",
    [
        "world == 8",
        "world <= 8 and world >= 8 and world < 9 and world > 7 and world != 7",
        "1 < parallelism.tensor < 3",
        "parallelism.tensor * parallelism.shard == world",
        "training.seq_len // parallelism.tensor % 2 == 0",
        "-world + 9 == +1",
        "training.seq_len / 2 == 2048.0",
        "precision == 'bf16' or precision == \"fp32\"",
        "precision in ['bf16', 'fp32'] and precision not in ('fp16',)",
        "not training.deterministic",
        "training.deterministic == false and training.deterministic != true",
        "training.microbatch == null and training.microbatch == None",
        "min(parallelism.tensor, parallelism.shard) == 2 and max(1, 2, 3) == 3 and abs(-world) == 8",
        "len(precision) == 4 and 'tp' in parallelism",
        "optimizer.lr < 1e-3",
        "(world == 1) == (parallelism.tensor == 1)",
        "world == 8 or no.such.key",  # what decides ends it
        "not (world == 1 and no.such.key)",
        "true",
    ],
)
def test_it_holds(text):
    assert holds(text)
    assert not holds(f"not ({text})")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("__import__('os').system('true')", "calls a function that is not min, max, abs or len"),
        ("min(world, key=abs)", "calls a function"),
        ("max(*[1, 2])", "which a condition may not contain"),
        ("'a'.upper() == 'A'", "calls a function"),
        ("'a'.real", "contains Attribute, which a condition"),
        ("(world).__class__.__bases__[0]", "contains Subscript, which a condition"),
        ("min(world).__class__", "contains Attribute, which a condition"),
        ("lambda: 1", "contains Lambda, which a condition"),
        ("[each for each in (1, 2)]", "contains ListComp, which a condition"),
        ("f'{world}' == '8'", "contains JoinedStr, which a condition"),
        ("world if true else 1", "contains IfExp, which a condition"),
        ("2 ** 100000000 > world", "contains Pow, which a condition"),
        ("world << 3 == 64", "contains LShift, which a condition"),
        ("~world == 1", "contains Invert, which a condition"),
        ("training.microbatch is None", "contains Is, which a condition"),
        ("b'x' == b'x'", "contains Constant, which a condition"),
        ("world ==", "cannot be read (invalid syntax"),
        ("world = 8", "cannot be read (invalid syntax"),
        ("(" * 400 + "1" + ")" * 400, "cannot be read"),
        ("\0", "cannot be read"),
        ("", "is not a condition"),
        (3, "is not a condition"),
        (None, "is not a condition"),
    ],
)
def test_it_is_refused(text, said):
    with pytest.raises(ConfigError) as error:
        read_expression(text)
    assert error.value.key == "where"
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("world", "is 8 for a point, neither true nor false"),
        ("world and true", "world is 8, neither true nor false"),
        ("precision < 3", "cannot be computed for a point"),
        ("precision * 1000000000 == 'x'", "'bf16' is not a number"),
        ("[1] * 1000000000 == 1", "is not a number"),
        ("true + 1 == 2", "True is not a number"),
        ("world / 0 == 1", "cannot be computed for a point (division by zero)"),
        ("len(world) == 1", "cannot be computed"),
        ("min(precision, 3) == 3", "cannot be computed"),
    ],
)
def test_it_cannot_be_computed(text, said):
    with pytest.raises(ConfigError) as error:
        holds(text)
    assert said in str(error.value)


@given(st.text(alphabet="world.min()[]{}'\"=<>!&|+-*/%@:,; 019_andortief\n\\", max_size=60))
def test_whatever_is_typed_is_a_condition_or_refused(text):
    try:
        said = read_expression(text).holds(lambda key: 1, "a point")
    except ConfigError as error:
        said = error.key
    assert said in (True, False, "where")


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers() | st.text())


@given(st.dictionaries(st.text(min_size=1), values), st.integers(0, 2000), st.integers(0, 2000))
def test_every_label_can_be_a_folder_of_bounded_length(values: dict[str, Any], one: int, other: int) -> None:
    """The number of a repeat is not cut off, however long the values are."""
    labels = [SweepPoint(values=values, repeat=repeat).label for repeat in (one, other)]
    assert (labels[0] == labels[1]) == (one == other)
    for label in labels:
        check_name("name", label)
        assert len(label) <= LENGTH


@pytest.mark.parametrize(
    ("values", "repeat", "label"),
    [
        ({}, 0, "base"),
        ({}, 2, "base-r2"),
        ({"name": "x", "repeat": 3}, 0, "base"),
        ({"parallelism": "mine/fsdp"}, 0, "fsdp"),
        ({"launch": "local", "precision": "bf16"}, 0, "launch_local-bf16"),
        ({"model.tied_embeddings": True, "model.fused": False}, 0, "tied_embeddings-no_fused"),
        ({"training.seq_len": 4096, "optimizer.lr": 3e-4}, 0, "seq_len4096-lr0.0003"),
        ({"data.shares": [1, 2], "init_from": None}, 0, "shares_1x2-init_from_none"),
        ({"data.files": "my texts/*.txt"}, 0, "files_my-texts-.txt"),
        ({"k": "é"}, 0, "base"),
        ({"a.b": "x" * 80}, 12, "b_" + "x" * 54 + "-r12"),
        ({"a.b": "x" * 50 + "-" * 9 + "y"}, 0, "b_" + "x" * 50),
    ],
)  # fmt: skip
def test_a_label_says_the_values_in_short(values: dict[str, Any], repeat: int, label: str) -> None:
    assert SweepPoint(values=values, repeat=repeat).label == label


def points(recipes, repeats, *, control=False):
    planned = [SweepPoint(values={"ac": recipe}, repeat=repeat) for recipe in recipes for repeat in range(repeats)]
    return [*planned, *(control_points({}, repeats) if control else [])]


def names(planned):
    return "".join(
        "C" if planned[number].is_control else planned[number].values["ac"] for number in starting_order(planned)
    )


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        (points("ab", 1), "ab"),
        (points("ab", 2), "abba"),
        (points("ab", 3), "abbaab"),
        (points("abc", 2), "abccba"),
        (points("a", 3), "aaa"),
        ([], ""),
        # A swept repeat is a repeat.
        ([SweepPoint(values={"ac": recipe, "repeat": repeat}) for recipe in "ab" for repeat in (0, 1)], "abba"),
        # Recipes that have fewer repeats are left out of later rounds.
        ([*points("a", 2), *points("b", 1)], "aba"),
        # The control starts first, last and between.
        (points("ab", 3, control=True), "CabCbaCabC"),
        (points("ab", 2, control=True), "CabCbaC"),
        (points("abcd", 1, control=True), "CabCcdC"),
        (points("a", 1, control=True), "CCaC"),
        (points("abc", 1, control=True), "CaCbcC"),
    ],
)
def test_repeats_start_in_turns(planned, expected):
    assert names(planned) == expected


@pytest.mark.parametrize(("repeats", "count"), [(1, 3), (2, 3), (3, 4), (1000, 1001)])
def test_the_control_runs_before_each_round_and_at_the_end_and_at_least_three_times(repeats, count):
    planned = control_points({"ac": "none"}, repeats)
    # No repeat of a point has a number of these: a sweep has at most 1,000.
    assert [point.repeat for point in planned] == list(range(1000, 1000 + count))
    assert len({point.label for point in planned}) == count


def test_a_step_of_a_stack_keeps_the_values_of_the_steps_before_it():
    space = {"stack": [{}, {"compile": "block"}, {"precision": "bf16"}, {"compile": "off"}]}
    points = expand(space)
    assert points == [
        {},
        {"compile": "block"},
        {"compile": "block", "precision": "bf16"},
        {"compile": "off", "precision": "bf16"},
    ]
    assert list(stack_steps(space).values()) == [0, 1, 2, 3]
    assert stack_steps({"list": [{}, {"ac": "full"}]}) == {}
    assert expand({"product": [space, {"seed": [1, 2]}]})[-1] == {"compile": "off", "precision": "bf16", "seed": 2}
    with pytest.raises(ConfigError, match="occurs twice"):
        expand({"stack": [{"ac": "full"}, {"ac": "full"}]})
