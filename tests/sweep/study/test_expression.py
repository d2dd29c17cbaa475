"""Conditions: what they may have in them, what they come to, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlab.errors import ConfigError
from titanlab.sweep.space import read_expression

VALUES = {
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
    return read_expression(text).holds(VALUES.__getitem__, "a point")


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


def test_names_are_keys_in_their_order():
    found = read_expression("parallelism.tensor > 1 or world == 2 and min(world, seed) < 3 or true")
    assert found.names == ("parallelism.tensor", "world", "seed")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("__import__('os').system('true')", "calls a function that is not min, max, abs or len"),
        ("min(world, key=abs)", "calls a function"),
        ("max(*[1, 2])", "has something in it that no condition has"),
        ("'a'.upper() == 'A'", "calls a function"),
        ("'a'.real", "takes a part of something that is no key"),
        ("(world).__class__.__bases__[0]", "takes an item of something"),
        ("min(world).__class__", "takes a part of something that is no key"),
        ("lambda: 1", "makes a function"),
        ("[each for each in (1, 2)]", "no condition has (ListComp)"),
        ("f'{world}' == '8'", "no condition has (JoinedStr)"),
        ("world if true else 1", "no condition has (IfExp)"),
        ("2 ** 100000000 > world", "has a power"),
        ("world << 3 == 64", "no condition has (LShift)"),
        ("~world == 1", "no condition has (Invert)"),
        ("training.microbatch is None", "write =="),
        ("b'x' == b'x'", "no condition has (Constant)"),
        ("world ==", "cannot be read (invalid syntax"),
        ("world = 8", "cannot be read (invalid syntax"),
        ("(" * 400 + "1" + ")" * 400, "cannot be read"),
        ("\0", "cannot be read"),
        (" or ".join(["world == 1"] * 200), "characters, and 1000 are enough"),
        ("", "is no condition"),
        (3, "is no condition"),
        (None, "is no condition"),
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
        ("precision * 1000000000 == 'x'", "'bf16' is no number"),
        ("[1] * 1000000000 == 1", "is no number"),
        ("true + 1 == 2", "True is no number"),
        ("world / 0 == 1", "cannot be computed for a point (division by zero)"),
        ("len(world) == 1", "cannot be computed"),
        ("min(precision, 3) == 3", "cannot be computed"),
        ("1e308 * 10 ** 1 == 1", "has a power"),
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
