"""Points of a sweep from which successive checks drop some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from titanlab.errors import ConfigError
from titanlab.sweep.study.prune import Unfit
from titanlab.sweep.study.space import Values, keys_of

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
