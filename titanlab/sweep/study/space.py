"""The grammar of a space, and its points.

A space is a mapping with one of three words:

    product: {parallelism: [fsdp, tp], precision: [bf16, fp32]}      all combinations: 4 points
    zip: {world: [8, 16], training.global_batch: [16, 32]}           first with first, second with second: 2 points
    list: [{ac: full}, {ac: memory_budget, ac.budget: 0.3}]          points as written: 2 points

Each word also takes a list of spaces: `product` combines their points, `zip` pairs them, `list` concatenates them. An
item without a word has the word of its list.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from titanlab.errors import ConfigError

Values = Mapping[str, Any]
WORDS = ("product", "zip", "list")
SPACE = "space"
LIMIT = 100_000
_EXAMPLE = "write product: {parallelism: [fsdp, tp], precision: [bf16, fp32]}"


def expand(space: Any) -> list[Values]:
    """All points of a space; the values of the first key change slowest.

    Raises:
        ConfigError: it is not a space, or has no point, more than `LIMIT` points, or a point twice.
    """
    size = _size(space, SPACE)
    if size > LIMIT:
        raise ConfigError(SPACE, size, f"are more points than {LIMIT}", "take some values out")
    points = _points(space, SPACE)
    if not points:
        raise ConfigError(SPACE, space, "has no point", _EXAMPLE)
    seen: set[str] = set()
    for point in points:
        text = canonical_text(point)
        if text in seen:
            shown = ", ".join(f"{key}={value}" for key, value in point.items())
            raise ConfigError(SPACE, shown, "is there twice", "take one out; `repeats` runs every point several times")
        seen.add(text)
    return points


def keys_of(points: Sequence[Values]) -> list[str]:
    """All keys of the points, in order of first use."""
    return list(dict.fromkeys(key for point in points for key in point))


def canonical_text(value: Any) -> str:
    """A text that is equal only for equal values of the same type: 1 differs from true and from 1.0."""
    return json.dumps(value, sort_keys=True, default=str)


def _size(space: Any, place: str) -> int:
    """The number of points, computed before any is created."""
    word, inner = _read(space, place)
    if isinstance(inner, Mapping):
        sizes = [len(values) for values in inner.values()] if word != "list" else [1]
    else:
        sizes = [_size(item, at) for item, at in _items(word, inner, place)]
    if word == "product":
        return math.prod(sizes)
    return max(sizes, default=0) if word == "zip" else sum(sizes)


def _points(space: Any, place: str) -> list[Values]:
    word, inner = _read(space, place)
    at = f"{place}.{word}"
    if isinstance(inner, Mapping):
        if word == "list":
            return [dict(inner)]
        parts: list[list[Values]] = [[{key: value} for value in values] for key, values in inner.items()]
        names = list(inner)
    else:
        items = _items(word, inner, place)
        parts = [_points(item, where) for item, where in items]
        names = [where.rpartition(".")[2] for _, where in items]
    if word == "list":
        return [point for part in parts for point in part]
    if word == "zip":
        _check_lengths(parts, names, at)
        return [_joined(points, at) for points in zip(*parts, strict=True)]
    return [_joined(points, at) for points in itertools.product(*parts)]


def _read(space: Any, place: str) -> tuple[str, Any]:
    """The word of a space, and its content."""
    if not isinstance(space, Mapping):
        raise ConfigError(place, space, f"is no space, which is a mapping with one of {', '.join(WORDS)}", _EXAMPLE)
    words = [word for word in WORDS if word in space]
    if len(space) != 1 or not words:
        if len(words) > 1 or (words and len(space) > 1):
            rule = f"has {' and '.join(map(str, space))} beside each other, and a space has one word"
            raise ConfigError(place, ", ".join(map(str, space)), rule, f"write product: [{{{words[0]}: …}}, …]")
        near = [close for key in space for close in difflib.get_close_matches(str(key), WORDS, n=1)]
        cure = f"did you mean {near[0]}?" if near else _EXAMPLE
        rule = f"has no word of a space: {', '.join(WORDS)}"
        raise ConfigError(place, ", ".join(map(str, space)) or "{}", rule, cure)
    word, inner = words[0], space[words[0]]
    at = f"{place}.{word}"
    if isinstance(inner, Mapping):
        if word != "list":
            _check_values(inner, at)
        else:
            _check_keys(inner, at)
    elif not isinstance(inner, list):
        raise ConfigError(at, inner, "takes a mapping, or a list of spaces", _EXAMPLE)
    elif not inner:
        raise ConfigError(at, "[]", "has no point", _EXAMPLE)
    return word, inner


def _items(word: str, inner: Sequence[Any], place: str) -> list[tuple[Any, str]]:
    """The items of a list as spaces, and the place of each for messages."""
    items = []
    for number, item in enumerate(inner):
        at = f"{place}.{word}[{number}]"
        if not isinstance(item, Mapping):
            cure = "write {key: value}" if word == "list" else "write {key: [values]}"
            raise ConfigError(at, item, "is neither a space nor a mapping of keys", cure)
        items.append((item if any(name in item for name in WORDS) else {word: item}, at))
    return items


def _check_values(inner: Mapping[Any, Any], at: str) -> None:
    if not inner:
        raise ConfigError(at, "{}", "has no key", _EXAMPLE)
    _check_keys(inner, at)
    for key, values in inner.items():
        where = f"{at}.{key}"
        if not isinstance(values, list):
            raise ConfigError(where, values, "must be a list of values", f"write {key}: [{values}]")
        if not values:
            raise ConfigError(where, "[]", "has no value", "give some, or leave the key out")
        if at.endswith(".zip"):
            # In a zip, a value may occur twice with different partners.
            continue
        known: set[str] = set()
        for value in values:
            if canonical_text(value) in known:
                raise ConfigError(where, value, "is there twice", "take one out; `repeats` runs a point several times")
            known.add(canonical_text(value))


def _check_keys(inner: Mapping[Any, Any], at: str) -> None:
    for key in inner:
        if not isinstance(key, str) or not key.strip():
            raise ConfigError(at, key, "is no key of a recipe", "write keys as text, such as training.seq_len")


def _check_lengths(parts: Sequence[Sequence[Values]], names: Sequence[str], at: str) -> None:
    lengths = [len(part) for part in parts]
    for name, length in zip(names, lengths, strict=True):
        if length != lengths[0]:
            rule = f"pairs {names[0]}, which has {lengths[0]} values, with {name}, which has {length}"
            raise ConfigError(at, length, rule, "give as many to both, or use product")


def _joined(points: Sequence[Values], at: str) -> Values:
    """One point from several parts, which must set different keys."""
    joined: dict[str, Any] = {}
    for point in points:
        for key, value in point.items():
            if key in joined:
                raise ConfigError(at, key, "is set by two parts of one point", "set it in one of them")
            joined[key] = value
    return joined
