"""Ranges of numbers: held for every whole number of every option, before anything computes with it."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field

import pytest

from tests.refusals import refusal
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.ranges import MOST, MOST_SECONDS, check_whole, ranged, shown_digits
from titanlab.recipe import Recipe

SCHEMAS = [
    pytest.param(found.schema, f"{group}.", id=f"{group}-{kind}")
    for group, kinds in discover().items()
    for kind, found in kinds.items()
]
# What an option cannot be made without.
NEEDED = {
    "Llama": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 192, "vocab_size": 2048},
    "Qwen3": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 192, "vocab_size": 2048},
    "Qwen3Moe": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 2048},
    "Mixtral": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 2048},
    "Files": {"files": "a.txt"},
    "Tokens": {"folder": "tokens"},
    "HF": {"path": "a/b"},
    "Csv": {"file": "order.csv"},
}


def fields_of(schema: type, kind: type, prefix: str = "") -> list[tuple[str, ...]]:
    """Paths of the fields that take such a number, those of parts too."""
    found: list[tuple[str, ...]] = []
    hints = typing.get_type_hints(schema)
    for name, declared in ((each.name, hints[each.name]) for each in dataclasses.fields(schema)):
        if dataclasses.is_dataclass(declared):
            found += [(name, *inner) for inner in fields_of(declared, kind)]
        elif kind in (declared, *typing.get_args(declared)) and typing.get_origin(declared) not in (tuple, dict):
            found.append((name,))
    return found


def made(schema: type, path: tuple[str, ...], value: object) -> object:
    name, *rest = path
    if rest:
        value = made(typing.get_type_hints(schema)[name], tuple(rest), value)
    return schema(**{**NEEDED.get(schema.__name__, {}), name: value})


@pytest.mark.parametrize(("schema", "prefix"), [*SCHEMAS, pytest.param(Recipe, "", id="recipe")])
@pytest.mark.parametrize("value", [10**26, -(10**26), 1 << 20_000], ids=["large", "negative", "huge"])
def test_no_whole_number_of_an_option_is_without_end(schema, prefix, value):
    for path in fields_of(schema, int):
        if prefix + path[0] == "seed":
            continue  # A recipe's rules hold it.
        with pytest.raises(ConfigError) as refused:
            made(schema, path, value)
        # A schema's own rule may come first in a part.
        assert refused.value.key == prefix + ".".join(path)
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize(("schema", "prefix"), SCHEMAS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_no_number_of_an_option_is_infinite(schema, prefix, value):
    for path in fields_of(schema, float):
        with pytest.raises(ConfigError) as refused:
            made(schema, path, value)
        assert refused.value.key == prefix + ".".join(path)


@ranged("part.")
@dataclass(kw_only=True)
class Part:
    size: int = 3
    few: int = field(default=1, metadata={"most": 10, "least": -10})
    free: int = field(default=1, metadata={"most": None})
    wait_seconds: float | None = 1.5
    share: float = 0.5
    names: typing.Sequence[typing.Any] = ()

    def __post_init__(self) -> None:
        assert abs(self.size) <= MOST, "a rule has computed with it"
        self.found = []


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"size": MOST + 1}, "part.size=2147483648: must be at most 2,147,483,647; try 3"),
        ({"size": -MOST - 1}, "part.size=-2147483648: must be at least -2,147,483,647; try 3"),
        ({"few": 11}, "part.few=11: must be at most 10; try 1"),
        ({"few": -11}, "part.few=-11: must be at least -10; try 1"),
        ({"wait_seconds": 1e300}, "part.wait_seconds=1e+300: must be at most 1,000,000,000; try 1.5"),
        ({"wait_seconds": MOST_SECONDS + 1}, "part.wait_seconds=1000000001: must be at most 1,000,000,000; try 1.5"),
        ({"share": float("nan")}, "part.share=nan: must be a finite number; try 0.5"),
    ],
)
def test_what_is_out_of_range_is_one_line(given, line):
    assert refusal(Part, **given) == line


def test_what_is_in_range_is_taken():
    part = Part(size=MOST, few=-10, free=10**30, wait_seconds=None, share=-(10**12))
    assert (part.size, part.few, part.free, part.wait_seconds) == (MOST, -10, 10**30, None)


def test_only_lists_of_a_config_become_tuples():
    part = Part(names=["a", ["b"]])
    assert part.names == ("a", ("b",))
    assert part.found == []


def test_a_number_of_many_digits_is_shown_in_short():
    assert shown_digits(10**25) == "1" + "0" * 25
    assert shown_digits(10**100) == "(a number of about 101 digits)"
    assert shown_digits(1 << 20_000) == "(a number of about 6,021 digits)"
    with pytest.raises(ConfigError, match="--tokens=11: must be at most 10; give a smaller number"):
        check_whole("--tokens", 11, 10)
