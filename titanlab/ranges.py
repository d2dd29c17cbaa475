"""How large a number of a config may be, before anything computes with it.

Numbers in a config are typed by people. One with too many digits makes loops endless and tables huge, long before a
rule about it is reached. So every whole number of a config has a range, which is held first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

from titanlab.errors import ConfigError

T = TypeVar("T", bound=type)

# What counts in 32 bits reaches: no size, count or number of steps of a training is near it.
MOST = 2**31 - 1
MOST_64_BITS = 2**63 - 1  # of an argument of a verb, such as a seed: what torch takes
# Thirty years. Timers of the operating system take no more than 2⁶³ nanoseconds.
MOST_SECONDS = 10**9
_DIGITS = 40  # of a number that a message shows


def ranged(prefix: str) -> Callable[[T], T]:
    """Class decorator: the numbers of a config dataclass are held to their ranges whenever one is made.

    Whole numbers: at most `MOST` on both sides of 0, or the field's `metadata={"most": …}` (None: a rule of its own
    says more). Numbers with a fraction: finite. Fields whose names end in `_seconds`: at most `MOST_SECONDS`.

    Args:
        prefix: of the keys in messages: `model.`; empty for the recipe's own.
    """

    def decorate(schema: T) -> T:
        construct = schema.__init__  # type: ignore[misc]
        fields = {field.name: field for field in dataclasses.fields(schema)}

        @functools.wraps(construct)
        def checked(self: Any, *positional: Any, **given: Any) -> None:
            # Whole numbers come first: the schema's own rules compute with them.
            for name, value in given.items():
                if name in fields:
                    _check_size(fields[name], prefix, value)
            construct(self, *positional, **given)
            # What is not finite breaks most schemas' own rules, which say what else to give.
            for field in fields.values():
                _check_finite(field, prefix, getattr(self, field.name, None))

        schema.__init__ = checked  # type: ignore[misc]
        return schema

    return decorate


def check_whole(key: str, value: int, most: int = MOST, *, cure: str = "give a smaller number") -> None:
    """Hold a whole number to be at most so far from 0.

    Raises:
        ConfigError: it is further.
    """
    if abs(value) > most:
        rule = f"must be at most {most:,}" if value > 0 else f"must be at least -{most:,}"
        raise ConfigError(key, shown_digits(value), rule, cure)


def shown_digits(value: int) -> str:
    """A whole number as text; of a very long one the first digits and how many there are."""
    # Python refuses to write numbers of more than 4,300 digits, so the logarithm is asked first.
    digits = int(abs(value).bit_length() * math.log10(2)) + 1
    if digits > 4000:
        return f"(a number of about {digits:,} digits)"
    text = str(value)
    return text if len(text) <= _DIGITS else f"{text[:_DIGITS]}… ({len(text):,} digits)"


def _check_size(field: dataclasses.Field[Any], prefix: str, value: Any) -> None:
    key = prefix + field.name
    for inner in _parts(value):
        _check_size(inner, f"{key}.", getattr(value, inner.name))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    # What is infinite or no number is left to the schema's own rules.
    if field.name.endswith("_seconds") and MOST_SECONDS < abs(value) < math.inf:
        shown = shown_digits(value) if isinstance(value, int) else value
        raise ConfigError(key, shown, f"must be at most {MOST_SECONDS:,}", f"try {_usual(field)}")
    most = field.metadata.get("most", MOST)
    # A whole number in a field of fractions is one of those.
    if isinstance(value, int) and most is not None and "float" not in str(field.type):
        check_whole(key, value, most, cure=f"try {_usual(field)}" if _usual(field) else "give a smaller number")


def _check_finite(field: dataclasses.Field[Any], prefix: str, value: Any) -> None:
    for inner in _parts(value):
        _check_finite(inner, f"{prefix}{field.name}.", getattr(value, inner.name))
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(prefix + field.name, value, "must be a finite number", f"try {_usual(field) or 1}")


def _parts(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Fields of a part of a config, such as `optimizer.schedule`; a group's option holds its own."""
    if not dataclasses.is_dataclass(value) or hasattr(value, "__titanlab_option__"):
        return ()
    return dataclasses.fields(value)


def _usual(field: dataclasses.Field[Any]) -> str:
    """The default of a field as it is typed; empty where it has none."""
    if field.default is None:
        return "null"
    return str(field.default) if isinstance(field.default, int | float) else ""
