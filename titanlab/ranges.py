"""Checks the numbers and choices of a config before any code uses it, and makes all of its values hashable.

Without these checks, a number with too many digits could cause endless loops and huge tables.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from titanlab.errors import ConfigError

T = TypeVar("T", bound=type)

# Far above any size, count or number of steps of a training.
MOST = 2**31 - 1
MOST_64_BITS = 2**63 - 1  # for arguments of verbs, such as seeds: torch accepts no more
# Thirty years: below the 2⁶³ nanoseconds that timers of the operating system accept.
MOST_SECONDS = 10**9
_DIGITS = 40  # most digits of a number in a message


def ranged(prefix: str) -> Callable[[T], T]:
    """Class decorator: check the numbers and choices of a config dataclass whenever an instance is made.

    Lists become tuples. Whole numbers must have an absolute value of at most `MOST`, floats must be finite, and fields
    whose names end in `_seconds` at most `MOST_SECONDS`. A field's metadata may add limits: `most` of a whole number
    (None: another rule checks it), `least`, `positive` (True), `choices`; and `cure`, the advice if a limit is broken.
    A class that declares a field again inherits the field's metadata from its bases.

    Args:
        prefix: prefix of the keys in errors, such as `model.`; empty for the recipe's own keys.
    """

    def decorate(schema: T) -> T:
        construct = schema.__init__  # type: ignore[misc]
        fields = dataclasses.fields(schema)

        @functools.wraps(construct)
        def checked(self: Any, *positional: Any, **keywords: Any) -> None:
            # Sizes are checked before the schema's own rules, which compute with them.
            for key, field, limits, value in _values(schema, prefix, keywords):
                _check_size(key, field, limits, value)
                _check_limits(key, field, limits, value)
            construct(self, *positional, **keywords)
            # Finiteness is checked after the schema's own rules, which give better advice.
            for key, field, limits, value in _values(schema, prefix, vars(self)):
                if isinstance(value, float) and not math.isfinite(value):
                    cure = limits.get("cure", f"try {_usual(field) or 1}")
                    raise ConfigError(key, value, "must be a finite number", cure)
            for field in fields:
                # OmegaConf and callers pass lists and dictionaries.
                if isinstance(value := vars(self).get(field.name), list | dict):
                    object.__setattr__(self, field.name, hashable(value))

        schema.__init__ = checked  # type: ignore[misc]
        return schema

    return decorate


_Limits = Mapping[str, Any]


def _values(
    schema: type, prefix: str, values: Mapping[str, Any]
) -> Iterator[tuple[str, dataclasses.Field[Any], _Limits, Any]]:
    """Key, field, limits and value of each entry of a config, and of configs nested in it (`optimizer.schedule`)."""
    for field, limits in declared_fields(schema):
        if field.name not in values:
            continue
        key, value = prefix + field.name, values[field.name]
        # A nested option checked its own values when it was made.
        if dataclasses.is_dataclass(value) and not hasattr(value, "__titanlab_option__"):
            yield from _values(type(value), f"{key}.", vars(value))
        else:
            yield key, field, limits, value


@functools.cache
def declared_fields(schema: type) -> tuple[tuple[dataclasses.Field[Any], _Limits], ...]:
    """The fields of a dataclass, each with its own metadata and those of its bases."""
    found = []
    for field in dataclasses.fields(schema):
        limits: dict[str, Any] = {}
        for base in reversed(schema.__mro__):
            declared = vars(base).get("__dataclass_fields__", {}).get(field.name)
            limits |= declared.metadata if declared is not None else {}
        found.append((field, limits))
    return tuple(found)


def _check_size(key: str, field: dataclasses.Field[Any], limits: _Limits, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    # Infinity and NaN pass here; later checks refuse them.
    if field.name.endswith("_seconds") and MOST_SECONDS < abs(value) < math.inf:
        shown = shown_digits(value) if isinstance(value, int) else value
        raise ConfigError(key, shown, f"must be at most {MOST_SECONDS:,}", f"try {_usual(field)}")
    most = limits.get("most", MOST)
    # A whole number in a float field counts as a float.
    if isinstance(value, int) and most is not None and "float" not in str(field.type):
        check_whole(key, value, most, cure=f"try {_usual(field)}" if _usual(field) else "give a smaller number")


def _check_limits(key: str, field: dataclasses.Field[Any], limits: _Limits, value: Any) -> None:
    choices = limits.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(key, value, "no such choice", f"choose one of {', '.join(choices)}")
    if value is None and re.search("None|Optional", str(field.type)):
        return
    least, cure = limits.get("least"), limits.get("cure", f"try {_usual(field)}")
    # A value that is not a number can only come from Python code.
    is_number = isinstance(value, numbers.Real)
    # `not … >=`, because `nan < least` is False.
    if least is not None and not (is_number and value >= least):
        raise ConfigError(key, value, "must not be negative" if least == 0 else f"must be at least {least}", cure)
    if limits.get("positive") and not (is_number and value > 0):
        raise ConfigError(key, value, "must be a positive number", cure)


def _usual(field: dataclasses.Field[Any]) -> str:
    """The default of a field as text for an override; empty if the default is not a number."""
    if field.default is None:
        return "null"
    return str(field.default) if isinstance(field.default, int | float) else ""


class FrozenDict(dict[Any, Any]):
    """A dictionary as a value of a config: hashable, because it is never changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a config is never changed: make another with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def hashable(value: Any) -> Any:
    """The same value with tuples for lists, and a `FrozenDict` for each dictionary."""
    if isinstance(value, list | tuple):
        return tuple(map(hashable, value))
    if isinstance(value, dict):
        return FrozenDict({key: hashable(inner) for key, inner in value.items()})
    return value


def plain(value: Any) -> Any:
    """A config, or a value of one, as dictionaries, lists and scalars, in the order of its fields."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def check_whole(key: str, value: int, most: int = MOST, *, cure: str = "give a smaller number") -> None:
    """Check that the absolute value of a whole number is at most `most`."""
    if abs(value) > most:
        rule = f"must be at most {most:,}" if value > 0 else f"must be at least -{most:,}"
        raise ConfigError(key, shown_digits(value), rule, cure)


def shown_digits(value: int) -> str:
    """A whole number as text; for a very long number, the count of its digits."""
    # Python does not convert a number of more than 4,300 digits to text, so estimate the count.
    digits = int(abs(value).bit_length() * math.log10(2)) + 1
    return str(value) if digits <= _DIGITS else f"(a number of about {digits:,} digits)"
