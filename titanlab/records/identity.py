"""A run's identity: the hash in the name of its folder, computed when the folder is made.

The hash covers the resolved recipe, the fingerprints of the data and of the starting weights, the kind of hardware
and the number of the repeat. It leaves out fields (or whole groups) marked `metadata={"identity": False}`: the name,
the tracker, paths and logging. It does not cover the code.

Fields with their default value are hashed too. Otherwise, when a version changes a default, two different recipes
would have the same hash. A field that is added later declares which value means the earlier behaviour:

    fused: bool = field(default=True, metadata={"before": False})

With that value the field is left out of the hash, so that older runs keep their hashes.
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
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A run's identity. Two identities are equal if their hashes and their hashed values are."""

    sha256: str
    content: Mapping[str, Any]
    # When the run's folder was made, in seconds since the epoch; None: it was not recorded.
    created: float | None = field(default=None, compare=False)
    # The run's id in trackers; None for runs of earlier versions, whose id is in their checkpoints.
    tracker_id: str | None = field(default=None, compare=False)
    # The checkpoint from which this run started: its run, as `sweep/folder`, and its step.
    parent_run: str | None = field(default=None, compare=False)
    parent_step: int | None = field(default=None, compare=False)

    @property
    def hash8(self) -> str:
        """The short form in folder names."""
        return self.sha256[:8]


def identify(recipe: Any, *, data: str, hardware: str, repeat: int = 0, weights: str | None = None) -> Identity:
    """The identity of a resolved recipe.

    Args:
        recipe: nested dataclasses, resolved: no degree of -1, no `auto`.
        data: the data's fingerprint.
        hardware: kind of device, such as `NVIDIA H100 80GB HBM3` or `cpu`.
        repeat: number of this run among repetitions of the same recipe.
        weights: fingerprint of the starting weights; None: the weights are drawn from the recipe's seed.
    """
    content = {"schema": SCHEMA, "recipe": canonical(recipe), "data": data, "hardware": hardware, "repeat": int(repeat)}
    if weights is not None:
        content["weights"] = weights
    return Identity(sha256=hashlib.sha256(canonical_json(content).encode()).hexdigest(), content=content)


def canonical_json(value: Any) -> str:
    """The canonical JSON text of plain values: sorted keys, no spaces, shortest exact form of every float."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical(value: Any) -> Any:
    """A dataclass, or a value of its fields, as the plain values that are hashed.

    Numbers get the declared type of their field: 1 in a float field becomes 1.0. Without a declared type (`Any`), a
    whole number becomes an integer. Keys of mappings become text, -0.0 becomes 0.0, NaN and infinity become text.

    Raises:
        TypeError: a configuration cannot contain such a value.
    """
    return _plain(value, Any)


def _plain(value: Any, declared: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {}
        for name, kind, before in _hashed_fields(type(value)):
            plain = _plain(getattr(value, name), kind)
            # Compare the values as text, because in Python True == 1 == 1.0.
            if not before or canonical_json(plain) != before:
                values[name] = plain
        return values
    if isinstance(value, enum.Enum):
        return _plain(value.value, Any)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return _number(value, declared)
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, Mapping):
        value_type = _argument(declared, 1)
        return {_key(key): _plain(inner, value_type) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        item_type = _argument(declared, 0)
        return [_plain(item, item_type) for item in value]
    raise TypeError(f"{type(value).__qualname__} {value!r}: not a value of a configuration, so it cannot be hashed")


@functools.cache
def _hashed_fields(schema: type) -> tuple[tuple[str, Any, str], ...]:
    """Name, declared type and `before` value (JSON text; empty: none) of each field that is hashed."""
    declared = typing.get_type_hints(schema)
    return tuple(
        (
            each.name,
            declared[each.name],
            canonical_json(_plain(each.metadata["before"], declared[each.name])) if "before" in each.metadata else "",
        )
        for each in dataclasses.fields(schema)
        if each.metadata.get("identity", True)
    )


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
    """The types of a union; for any other type, that type alone."""
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        return typing.get_args(declared)
    return (declared,)


def _argument(declared: Any, position: int) -> Any:
    """Type of a list's items (0) or of a mapping's values (1)."""
    for alternative in _alternatives(declared):
        arguments = typing.get_args(alternative)
        if typing.get_origin(alternative) is not None and len(arguments) > position:
            return arguments[position]
    return Any


def _key(key: Any) -> str:
    if isinstance(key, enum.Enum):
        key = key.value
    if not isinstance(key, (str, int)):
        raise TypeError(f"{key!r}: keys of a configuration are text")
    return str(key)
