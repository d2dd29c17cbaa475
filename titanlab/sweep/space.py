"""The grammar of a space, its points, and conditions on a point's values.

A space is a mapping with one of four words:

    product: {parallelism: [fsdp, tp], precision: [bf16, fp32]}      all combinations: 4 points
    zip: {world: [8, 16], training.global_batch: [16, 32]}           first with first, second with second: 2 points
    list: [{ac: full}, {ac: memory_budget, ac.budget: 0.3}]          points as written: 2 points
    stack: [{compile: "off"}, {compile: block}, {precision: bf16}]   each with the values before it: 3 points

Each word also takes a list of spaces: `product` combines their points, `zip` pairs them, `list` and `stack` concatenate
them. An item without a word has the word of its list.

A condition, such as `world <= 64 and precision != "fp32"`, is parsed with Python's grammar and evaluated here, node by
node: names are keys of the recipe; comparisons, `and`, `or`, `not`, `in`, arithmetic of numbers and a few functions are
allowed, and nothing else. No code is run.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import itertools
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlab.costs import SHORT
from titanlab.errors import ConfigError
from titanlab.records import safe_name

Values = Mapping[str, Any]
WORDS = ("product", "zip", "list", "stack")
# Words whose mappings are points; mappings of the other words have a list of values for each key.
_OF_POINTS = ("list", "stack")
SPACE = "space"
LIMIT = 100_000
_EXAMPLE = "write product: {parallelism: [fsdp, tp], precision: [bf16, fp32]}"


def expand(space: Any) -> list[Values]:
    """All points of a space; the values of the first key change slowest.

    Raises:
        ConfigError: it is not a space, or has no point, more than `LIMIT` points, or a point twice.
    """
    points = _points(space, SPACE)
    if not points:
        raise ConfigError(SPACE, space, "has no point", _EXAMPLE)
    seen: set[str] = set()
    for point in points:
        text = canonical_text(point)
        if text in seen:
            shown = ", ".join(f"{key}={value}" for key, value in point.items())
            raise ConfigError(SPACE, shown, "occurs twice", "take one out; `repeats` runs every point several times")
        seen.add(text)
    return points


def stack_steps(space: Any) -> dict[str, int]:
    """Canonical text of a point → the number of its step in the stack; empty: the space is not a stack."""
    with contextlib.suppress(ConfigError):
        if isinstance(space, Mapping) and "stack" in space:
            return {canonical_text(point): number for number, point in enumerate(expand(space))}
    return {}


def keys_of(points: Sequence[Values]) -> list[str]:
    """All keys of the points, in order of first use."""
    return list(dict.fromkeys(key for point in points for key in point))


def canonical_text(value: Any) -> str:
    """A text that is equal only for equal values of the same type: 1 differs from true and from 1.0."""
    return json.dumps(value, sort_keys=True, default=str)


def as_text(value: Any) -> str:
    """A point's value as one types it: `null`, `true`, `0.001`, `fsdp_tp`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_text, value)) + "]"
    return str(value)


def flattened(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings by its dotted key; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differing(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], left_out: Sequence[str]
) -> list[tuple[str, str, str]]:
    """(key, value in `ours`, value in `theirs`) as text, for each key that differs; `–`: the key is missing.

    Args:
        left_out: keys or groups at the top of the configs that are not compared.
    """
    old, new = ({key: as_text(value) for key, value in flattened(config)} for config in (ours, theirs))
    return [
        (key, old.get(key, "–"), new.get(key, "–"))
        for key in {**old, **new}
        if key.partition(".")[0] not in left_out and old.get(key) != new.get(key)
    ]


def _points(space: Any, place: str) -> list[Values]:
    word, inner = _read(space, place)
    at = f"{place}.{word}"
    if isinstance(inner, Mapping) and word in _OF_POINTS:
        _check_names(inner, at)
        return [dict(inner)]
    if isinstance(inner, Mapping):
        _check_values(inner, word, at)
        parts: list[list[Values]] = [[{key: value} for value in values] for key, values in inner.items()]
        names = list(inner)
    else:
        names = [f"{word}[{number}]" for number in range(len(inner))]
        places = [f"{place}.{name}" for name in names]
        parts = [_points(_item(item, word, each), each) for item, each in zip(inner, places, strict=True)]
    # Check the number of points before they are created.
    sizes = [len(part) for part in parts]
    size = math.prod(sizes) if word == "product" else max(sizes) if word == "zip" else sum(sizes)
    if size > LIMIT:
        raise ConfigError(place, size, f"are more points than {LIMIT}", "take some values out")
    if word == "list":
        return list(itertools.chain(*parts))
    if word == "stack":
        # A step keeps the values of the steps before it.
        steps: list[Values] = []
        for point in itertools.chain(*parts):
            steps.append({**(steps[-1] if steps else {}), **point})
        return steps
    if word == "zip":
        for name, part in zip(names, parts, strict=True):
            if len(part) != len(parts[0]):
                rule = f"pairs {names[0]}, which has {len(parts[0])} values, with {name}, which has {len(part)}"
                raise ConfigError(at, len(part), rule, "give as many to both, or use product")
    together = zip(*parts, strict=True) if word == "zip" else itertools.product(*parts)
    return [_joined(points, at) for points in together]


def _read(space: Any, place: str) -> tuple[str, Any]:
    """The word of a space, and its content."""
    if not isinstance(space, Mapping):
        raise ConfigError(place, space, f"is not a space, which is a mapping with one of {', '.join(WORDS)}", _EXAMPLE)
    words = [word for word in WORDS if word in space]
    keys = ", ".join(map(str, space)) or "{}"
    if not words:
        near = [close for key in space for close in difflib.get_close_matches(str(key), WORDS, n=1)]
        cure = f"did you mean {near[0]}?" if near else _EXAMPLE
        raise ConfigError(place, keys, f"has no word of a space: {', '.join(WORDS)}", cure)
    if len(space) != 1:
        rule = f"has {' and '.join(map(str, space))} side by side, but a space has only one key"
        raise ConfigError(place, keys, rule, f"write product: [{{{words[0]}: …}}, …]")
    word, inner = words[0], space[words[0]]
    if not isinstance(inner, Mapping | list):
        raise ConfigError(f"{place}.{word}", inner, "takes a mapping, or a list of spaces", _EXAMPLE)
    if not inner and not (isinstance(inner, Mapping) and word in _OF_POINTS):
        rule = "has no key" if isinstance(inner, Mapping) else "has no point"
        raise ConfigError(f"{place}.{word}", inner, rule, _EXAMPLE)
    return word, inner


def _item(item: Any, word: str, at: str) -> Mapping[Any, Any]:
    """An item of a list as a space; an item without a word gets the word of its list."""
    if not isinstance(item, Mapping):
        cure = "write {key: value}" if word in _OF_POINTS else "write {key: [values]}"
        raise ConfigError(at, item, "is neither a space nor a mapping of keys", cure)
    return item if any(name in item for name in WORDS) else {word: item}


def _check_names(names: Iterable[Any], at: str) -> None:
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(at, name, "is not a key of a recipe", "write keys as text, such as training.seq_len")


def _check_values(inner: Mapping[Any, Any], word: str, at: str) -> None:
    _check_names(inner, at)
    for key, values in inner.items():
        where = f"{at}.{key}"
        if not isinstance(values, list):
            raise ConfigError(where, values, "must be a list of values", f"write {key}: [{values}]")
        if not values:
            raise ConfigError(where, "[]", "has no value", "give some, or leave the key out")
        # In a zip, a value may occur twice with different partners.
        counts = Counter(map(canonical_text, values))
        twice = [value for value in values if counts[canonical_text(value)] > 1]
        if twice and word != "zip":
            raise ConfigError(where, twice[0], "occurs twice", "take one out; `repeats` runs a point several times")


def _joined(points: Sequence[Values], at: str) -> Values:
    """One point from several parts, which must set different keys."""
    joined: dict[str, Any] = {}
    for point in points:
        for key in joined.keys() & point.keys():
            raise ConfigError(at, key, "is set by two parts of one point", "set it in one of them")
        joined.update(point)
    return joined


WHERE = "where"
"""The key of an error in a condition."""
_KEY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_CURE = "write a condition such as parallelism.tensor <= 8 and precision == 'bf16'"
_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
# No powers: a short expression could take forever.
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs, "len": len}
# The names of constants in YAML.
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None}

Look = Callable[[str], Any]
"""The value of a key; raises KeyError if the recipe has no such key."""


@dataclass(frozen=True)
class Expression:
    """A parsed condition; `names` are the keys that it asks for."""

    text: str
    names: tuple[str, ...]
    _compute: Callable[[Look], Any]

    def holds(self, look: Look, label: str) -> bool:
        """Whether a point meets the condition.

        Raises:
            ConfigError: the condition cannot be computed, or the result is neither true nor false.
        """
        try:
            result = self._compute(look)
        except KeyError as error:
            name = str(error.args[0])
            option = look(group := name.partition(".")[0])
            rule = f"asks for {name}, which {label} does not have: its {group} is {option}"
            raise ConfigError(WHERE, self.text, rule, f"ask first: {group} != {option!r} or …") from None
        except (TypeError, ValueError, ArithmeticError) as error:
            rule = f"cannot be computed for {label} ({' '.join(str(error).split())})"
            raise ConfigError(WHERE, self.text, rule, "compare numbers with numbers and texts with texts") from error
        if not isinstance(result, bool):
            rule = f"is {result!r} for {label}, neither true nor false"
            raise ConfigError(WHERE, self.text, rule, "compare it with something")
        return result


def read_expression(text: Any) -> Expression:
    """Parse a condition.

    Raises:
        ConfigError: it is not a text or not an expression, or contains something that conditions do not allow.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(WHERE, text, "is not a condition", _CURE)
    names: list[str] = []
    try:
        compute = _compiled(ast.parse(text.strip(), mode="eval").body, text, names)
    # RecursionError and MemoryError: some thousand nested brackets are too deep for the parser.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise ConfigError(WHERE, text, f"cannot be read ({message})", _CURE) from error
    return Expression(text, tuple(dict.fromkeys(names)), compute)


def _compiled(node: ast.expr, text: str, names: list[str]) -> Callable[[Look], Any]:
    """A function that computes a part of a condition; the keys in the part are added to `names`.

    Raises:
        ConfigError: the part contains something that conditions do not allow.
    """

    def inner(parts: Sequence[ast.expr]) -> list[Callable[[Look], Any]]:
        return [_compiled(part, text, names) for part in parts]

    match node:
        case ast.Name() | ast.Attribute() if _KEY.fullmatch(key := ast.unparse(node)):
            if key in _WORDS:
                return lambda look: _WORDS[key]
            names.append(key)
            return lambda look: look(key)
        case ast.Constant(value=bool() | int() | float() | str() | None as constant):
            return lambda look: constant
        case ast.BoolOp(op=op, values=parts):
            truths, decisive = inner(parts), isinstance(op, ast.Or)
            shown = list(map(ast.unparse, parts))
            # Stop at the first decisive part: later parts may use keys that this point does not have.
            return lambda look: (
                any(_truth(part(look), said) is decisive for part, said in zip(truths, shown, strict=True)) is decisive
            )
        case ast.UnaryOp(op=ast.Not(), operand=part):
            (truth,), said = inner([part]), ast.unparse(part)
            return lambda look: not _truth(truth(look), said)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=part):
            (number,), sign = inner([part]), -1 if isinstance(op, ast.USub) else 1
            return lambda look: sign * _number(number(look))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            (first, second), combine = inner([left, right]), _ARITHMETIC[type(op)]
            return lambda look: combine(_number(first(look)), _number(second(look)))
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
            sides, compare = inner([left, *others]), [_COMPARISONS[type(op)] for op in ops]

            def compared(look: Look) -> bool:
                before = sides[0](look)
                for operation, side in zip(compare, sides[1:], strict=True):
                    after = side(look)
                    if not operation(before, after):
                        return False
                    before = after
                return True

            return compared
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in _FUNCTIONS:
            arguments, function = inner(parts), _FUNCTIONS[name]
            return lambda look: function(*(argument(look) for argument in arguments))
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            items = inner(parts)
            return lambda look: [item(look) for item in items]
    # Name the operator that is refused, if there is one: it says more than the expression.
    operators = [getattr(node, "op", None), *getattr(node, "ops", ())]
    refused = next((op for op in operators if op and type(op) not in {**_COMPARISONS, **_ARITHMETIC}), node)
    rule = f"contains {type(refused).__name__}, which a condition may not contain"
    if isinstance(node, ast.Call):
        rule = "calls a function that is not min, max, abs or len"
    raise ConfigError(WHERE, text, rule, _CURE)


def _truth(value: Any, shown: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{shown} is {value!r}, neither true nor false")
    return value


def _number(value: Any) -> Any:
    # Only numbers: a text times a large number would fill the memory.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value


LENGTH = 60  # The most characters of a label.
BASE = "base"
# Names of options that mean nothing without their group.
_VAGUE = ("none", "off", "full", "block", "default", "local")


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One value for each key of a sweep."""

    values: Mapping[str, Any]
    repeat: int = 0
    is_control: bool = False

    @property
    def label(self) -> str:
        """The values in short, for the name of a folder: `fsdp_tp-bf16`, `tp8-seq_len4096`."""
        parts = [_part(key, value) for key, value in self.values.items() if key not in ("name", "repeat")]
        text = safe_name("-".join(parts), otherwise=BASE)
        return text[: LENGTH - len(self.suffix)].rstrip("-._") + self.suffix

    @property
    def suffix(self) -> str:
        """The number of the repetition; empty for the first, so that its name does not depend on later repeats."""
        return f"-r{self.repeat}" if self.repeat else ""


def _part(key: str, value: Any) -> str:
    group, _, rest = key.rpartition(".")
    if not group and isinstance(value, str):
        option = value.rpartition("/")[2]
        return f"{rest}_{option}" if option in _VAGUE else option
    if isinstance(value, bool):
        return rest if value else f"no_{rest}"
    short = SHORT.get(rest, rest)
    if isinstance(value, int | float):
        return f"{short}{value:g}" if isinstance(value, float) else f"{short}{value}"
    if isinstance(value, list):
        value = "x".join(map(str, value))
    return f"{short}_{'none' if value is None else value}"


# The number of the control's first repeat. The repeats of points are numbered from 0 to at most 999, so a run of the
# control is never equal to a run of a point with the same recipe.
FIRST_REPEAT = 1000
# The control has at least one run at the beginning, one in the middle, and one at the end.
_FEWEST = 3


def control_points(values: Values, repeats: int) -> list[SweepPoint]:
    """The points of the control's runs, in their order: one before each round of repeats, and one at the end."""
    count = max(_FEWEST, repeats + 1)
    return [SweepPoint(values=values, repeat=FIRST_REPEAT + number, is_control=True) for number in range(count)]


def starting_order(points: Sequence[SweepPoint]) -> list[int]:
    """The numbers of the points in the order in which their runs should start.

    Each round starts every recipe once, and every second round is backwards: recipes A and B start as A B B A A B. If
    the machine becomes slower or faster meanwhile, this affects all recipes alike: over two rounds, a steady drift is
    the same for each recipe. The control's runs start before, between and after the rounds.
    """
    rounds: list[list[int]] = []
    seen = Counter[str]()
    for number, point in enumerate(points):
        if point.is_control:
            continue
        # `repeat` may be swept like any other key.
        recipe = canonical_text({key: value for key, value in point.values.items() if key != "repeat"})
        if seen[recipe] == len(rounds):
            rounds.append([])
        rounds[seen[recipe]].append(number)
        seen[recipe] += 1
    order = [number for index, numbers in enumerate(rounds) for number in numbers[:: -1 if index % 2 else 1]]
    controls = [number for number, point in enumerate(points) if point.is_control]
    # The control's runs come first, last, and at equal distances: between the rounds, if these are equally long.
    size = len(order)
    for index, control in reversed(list(enumerate(controls))):
        order.insert(size * index // max(1, len(controls) - 1), control)
    return order
