"""Drops points before they are composed: by their degrees, and by the sweep's conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from titanlab.costs.layout import AXES, Layout, resolve_layout
from titanlab.errors import ConfigError
from titanlab.recipe.keys import find_key
from titanlab.sweep.composer import Composer
from titanlab.sweep.space import WHERE, Expression, SweepPoint, Values, keys_of
from titanlab.techniques.optimizer.contract import Schedule

WARMUP = "optimizer.schedule.warmup_steps"


class Unfit(Exception):
    """A point is dropped.

    Attributes:
        stage: the check that drops it.
        reason: a ConfigError, or another reason in words.
    """

    def __init__(self, stage: str, reason: ConfigError | str) -> None:
        self.stage = stage
        self.reason = reason
        super().__init__(stage, str(reason))


def prune(composer: Composer, point: Values, where: Sequence[Expression]) -> None:
    """Check a point against the conditions and the arithmetic of its degrees.

    Raises:
        Unfit: it does not meet them.
        ConfigError: a condition cannot be computed.
    """
    values = _Values(composer, point)
    for expression in where:
        if not expression.holds(lambda key, text=expression.text: values.value(key, text), values.label):  # type: ignore[misc]
            raise Unfit("where", expression.text)
    _ = values.layout


class _Values:
    """A point's values for conditions: degrees are resolved, and numbers are not texts."""

    def __init__(self, composer: Composer, point: Values) -> None:
        self._composer = composer
        self._point = point
        self._layout: Layout | None = None
        self.label = SweepPoint(values=point).label

    def value(self, key: str, condition: str) -> Any:
        """The value of a key in a condition.

        Raises:
            Unfit: the point has no layout, or cannot be composed.
            ConfigError: the point has no such key.
        """
        group, _, axis = key.rpartition(".")
        if key == "world" or (group == "parallelism" and axis in AXES):
            layout = self.layout
            if layout is not None:
                return layout.world if key == "world" else getattr(layout, axis)
        try:
            value = self._value(key)
            if key == WARMUP and value is None:
                # The default that resolving the recipe would set.
                steps = self._value("training.steps")
                return Schedule().warmup(steps) if isinstance(steps, int) else None
            return value
        except KeyError:
            if "." not in key:
                # A group, such as `recipe`, of which the point has no option.
                return None
            group = key.partition(".")[0]
            option = self._value(group)
            rule = f"asks for {key}, which {self.label} does not have: its {group} is {option}"
            cure = f"ask first: {group} != {option!r} or …"
            raise ConfigError(WHERE, condition, rule, cure) from None

    @property
    def layout(self) -> Layout | None:
        """The resolved degrees; None if they are not whole numbers, which the composition will report."""
        if self._layout is None:
            try:
                degrees = {axis: self._value(f"parallelism.{axis}") for axis in AXES}
                world = self._value("world")
            except KeyError:
                return None
            if not all(isinstance(degree, int) for degree in degrees.values()):
                return None
            if world is not None and (not isinstance(world, int) or world < 1):
                return None
            try:
                self._layout = resolve_layout(degrees, world)
            except ConfigError as error:
                raise Unfit("layout", error) from error
        return self._layout

    def _value(self, key: str) -> Any:
        try:
            value = self._composer.value(self._point, key)
        except ConfigError as error:
            raise Unfit("composition", error) from error
        return _number(value) if isinstance(value, str) and key in self._point and _is_number(key) else value


def _is_number(key: str) -> bool:
    known = find_key(key)
    return known is not None and "number" in known.accepted_values


def _number(text: str) -> Any:
    """The number that a text becomes in the composition; the text itself if it is not a number."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# The number of points that `check_shared` checks before all others; that takes about a second.
_PROBES = 8


class Sieve:
    """Points from which successive stages drop some; with `whole`, a stage's error is raised instead."""

    def __init__(self, points: Sequence[Values], *, whole: bool) -> None:
        self.points = points
        self._whole = whole
        self.dropped: dict[int, Unfit] = {}

    def __iter__(self) -> Iterator[int]:
        """The numbers of the points that are left."""
        return (number for number in range(len(self.points)) if number not in self.dropped)

    def keep(self, stage: Callable[[Values, int], Any]) -> dict[int, Any]:
        """Apply a stage to every point that is left, and drop those that it finds unfit. Returns its results by number.

        Raises:
            ConfigError: no point is left.
        """
        results: dict[int, Any] = {}
        for number in list(self):
            try:
                results[number] = stage(self.points[number], number)
            except Unfit as unfit:
                if self._whole and isinstance(unfit.reason, ConfigError):
                    raise unfit.reason from unfit
                self.dropped[number] = unfit
        if not results:
            raise self._nothing_left()
        return results

    def check_shared(self, stage: Callable[[Values], Any]) -> None:
        """Check a few points before all others, to report an error of the shared recipe at once.

        An error is shared if the stage raises it, with the same words, for the first point, for others up to the last,
        and for the recipe without any point's values, and if its key is not swept.

        Raises:
            ConfigError: the shared error.
        """
        numbers = list(self)
        if len(numbers) <= _PROBES:
            return
        error = _error(stage, self.points[numbers[0]])
        if error is None or error.key in keys_of(self.points):
            return
        others = [self.points[numbers[place * (len(numbers) - 1) // _PROBES]] for place in range(1, _PROBES + 1)]
        if all(str(_error(stage, point)) == str(error) for point in (*others, {})):
            raise error

    def _nothing_left(self) -> ConfigError:
        dropped = list(self.dropped.values())
        texts = Counter((unfit.stage, str(unfit.reason)) for unfit in dropped)
        (stage, reason), count = texts.most_common(1)[0]
        first = dropped[0].reason
        if isinstance(first, ConfigError) and len(texts) == 1:
            # All points have the same error: it does not depend on the swept values.
            return first
        if stage == "where" and len(texts) == 1:
            return ConfigError("where", reason, f"is met by none of {len(dropped)} points", "ask for less")
        rule = f"none of {len(dropped)} points can be run; {count} of them for one reason ({stage}: {reason})"
        cure = "change that, or sweep other values"
        return ConfigError("space", ",".join(keys_of(self.points)), rule, cure)


def _error(stage: Callable[[Values], Any], point: Values) -> ConfigError | None:
    """The ConfigError for which a stage drops a point; None if it keeps the point, or drops it for another reason."""
    try:
        stage(point)
    except Unfit as unfit:
        return unfit.reason if isinstance(unfit.reason, ConfigError) else None
    return None
