"""The control of a sweep: one recipe that runs at the beginning, between the repeats and at the end.

Its values are the same each time, so that a change of its speed is a change of the machine.
"""

from __future__ import annotations

from typing import Any

from titanlab.errors import ConfigError
from titanlab.sweep.study.point import Point
from titanlab.sweep.study.space import Values

CONTROL = "control"
# Of the control's runs, so that they are other runs than the repeats of a point with the same recipe: a sweep has at
# most 1,000 repeats, numbered from 0.
FIRST_REPEAT = 1000
# Of its runs: one at the beginning, one in the middle, and one at the end.
_FEWEST = 3
_EXAMPLE = "try control: {}, the recipe without the sweep's changes, or control: {ac: none}"


def read_control(value: Any) -> Values | None:
    """The control's values by key; None: the sweep has no control.

    Args:
        value: of the sweep's file, as plain values: a mapping, or `true` for an empty one; null or `false` for none.

    Raises:
        ConfigError: it is something else.
    """
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(CONTROL, value, "must be one mapping of keys to values", _EXAMPLE)
    for key, setting in value.items():
        if isinstance(setting, dict):
            raise ConfigError(CONTROL, f"{key}: {setting}", "takes keys with dots", f"write {key}.KEY: VALUE")
        if key in ("name", "repeat"):
            raise ConfigError(CONTROL, f"{key}: {setting}", "is given by the control itself", "leave it out")
    return dict(value)


def control_points(values: Values, repeats: int) -> list[Point]:
    """The points of the control's runs, in their order: one before each round of repeats, and one at the end."""
    count = max(_FEWEST, repeats + 1)
    return [Point(values=values, repeat=FIRST_REPEAT + number, is_control=True) for number in range(count)]
