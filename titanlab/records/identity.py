"""What makes two runs the same run: the hash in a run folder's name, fixed when the run is born.

Hashed are the resolved recipe without the fields marked `metadata={"identity": False}` (whole groups may
be), the data's fingerprint, that of weights which the run begins with, the kind of hardware and the repeat's
number. The name, the tracker, paths, logging and the code are not.

Every other field is hashed whether or not it has its default value: leaving defaults out would give two
recipes the same hash when a default changes between versions, and an old result would pass for a new
one. A field that is added later names the value under which everything stays as it was before:

    fused: bool = field(default=True, metadata={"before": False})

With that value the field is left out of the hash, so that the hashes of older runs hold.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

SCHEMA = 1
_NOTHING = object()


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A run's identity.

    Attributes:
        sha256: 64 hexadecimal digits.
        content: what was hashed, as plain values; kept in the run's folder to compare with.
    """

    sha256: str
    content: Mapping[str, Any]

    @property
    def hash8(self) -> str:
        """The short form in folder names."""
        return self.sha256[:8]


def identify(recipe: Any, *, data: str, hardware: str, repeat: int = 0, weights: str | None = None) -> Identity:
    """The identity of a resolved recipe.

    Args:
        recipe: nested dataclasses; no value may be left open (a degree of -1, `auto`).
        data: the data's fingerprint.
        hardware: kind of device, such as `NVIDIA H100 80GB HBM3` or `cpu`.
        repeat: number of this repetition of an otherwise equal run.
        weights: fingerprint of those that the run begins with; None: the recipe's seed makes them.
    """
    content = {"schema": SCHEMA, "recipe": canonical(recipe), "data": data, "hardware": hardware, "repeat": int(repeat)}
    if weights is not None:
        content["weights"] = weights
    return Identity(sha256=hashlib.sha256(canonical_json(content).encode()).hexdigest(), content=content)


def canonical_json(value: Any) -> str:
    """The one JSON text of plain values: sorted keys, no spaces, shortest exact form of every float."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical(value: Any) -> Any:
    """The plain values that a dataclass (or a part of one) stands for in a hash.

    Numbers follow the declared type of their field: 1 in a float field is 1.0. Without one (`Any`), a
    whole number is an integer. Keys of mappings are text; -0.0 is 0.0; what is not finite is its name.

    Raises:
        TypeError: a value that no configuration can hold.
    """
    return _plain(value, Any)


def _plain(value: Any, declared: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            name: plain
            for name, kind, before in _hashed_fields(type(value))
            if not _same(plain := _plain(getattr(value, name), kind), before)
        }
    if isinstance(value, enum.Enum):
        return _plain(value.value, Any)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return _number(value, declared)
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, Mapping):
        of_values = _argument(declared, 1)
        return {_key(key): _plain(inner, of_values) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        of_items = _argument(declared, 0)
        return [_plain(inner, of_items) for inner in value]
    raise TypeError(f"{type(value).__qualname__} {value!r}: no value of a configuration, so it cannot be hashed")


@functools.cache
def _hashed_fields(schema: type) -> tuple[tuple[str, Any, Any], ...]:
    """Name, declared type and `before` value of each field that counts."""
    declared = typing.get_type_hints(schema)
    return tuple(
        (each.name, declared[each.name], _plain(each.metadata["before"], declared[each.name]))
        if "before" in each.metadata
        else (each.name, declared[each.name], _NOTHING)
        for each in dataclasses.fields(schema)
        if each.metadata.get("identity", True)
    )


def _same(plain: Any, before: Any) -> bool:
    # Compared as text, in which True is not 1 and 1.0 is not 1.
    return before is not _NOTHING and canonical_json(plain) == canonical_json(before)


def _number(value: int | float, declared: Any) -> int | float | str:
    kinds = _alternatives(declared)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if float in kinds and int not in kinds:
        return float(value) + 0.0  # Adding 0.0 turns -0.0 into 0.0.
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(value)
    return int(value)


def _alternatives(declared: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type that it is."""
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        return typing.get_args(declared)
    return (declared,)


def _argument(declared: Any, position: int) -> Any:
    """Type of a list's items (0) or of a mapping's values (1)."""
    for each in _alternatives(declared):
        arguments = typing.get_args(each)
        if typing.get_origin(each) is not None and len(arguments) > position:
            return arguments[position]
    return Any


def _key(key: Any) -> str:
    if isinstance(key, enum.Enum):
        key = key.value
    if not isinstance(key, (str, int)):
        raise TypeError(f"{key!r}: keys of a configuration are text")
    return str(key)
