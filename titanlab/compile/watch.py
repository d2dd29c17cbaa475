"""Watching torch compile: how long it takes, and what it compiles again although nothing should have changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Functions that torch and torchao compile for themselves, such as an optimizer's update, are compiled once for each
# shape of a parameter.
_OWN = ("torch", "torchao")

SECONDS = "compile/seconds"
RECOMPILATIONS = "compile/recompilations"


@dataclass(frozen=True)
class Compilation:
    """One function that was compiled.

    Attributes:
        function: name and place, `forward (llama.py:130)`.
        reason: why what there was did not fit; empty for a function's first compilation.
        surprise: it should not have been necessary.
    """

    function: str
    reason: str
    surprise: bool


@dataclass(frozen=True)
class Found:
    """What was compiled since one last looked.

    Attributes:
        seconds: spent on it, without what overlaps.
        compilations: one by one.
    """

    seconds: float = 0.0
    compilations: tuple[Compilation, ...] = ()


class Watch:
    """Looks at what torch has compiled, by torch's own records, and tells of it.

    A first compilation is expected, and one more when a function is first called without gradients, as validation
    does. Everything else is a surprise: a step that costs seconds, again and again if what changes keeps changing.

    Args:
        active: metrics are of interest even before anything is compiled.
        note: takes a line about what went as expected.
        warn: takes a line about the first surprise.
    """

    def __init__(
        self,
        *,
        active: bool = False,
        note: Callable[[str], None] = lambda line: None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        """What was compiled before does not count."""
        self._active, self._note, self._warn = active, note, warn
        self._known: set[tuple[str, int]] = set()
        self._evaluated: set[tuple[str, int]] = set()
        self._last: Any = None
        self._limited = True
        self.seconds = 0.0
        self.surprises = 0
        self._new()

    def after_step(self, step: int, *, first: bool) -> float:
        """Look after a step, the first of the process or another; the seconds of it that compilation took."""
        found = self.look(first=first)
        if first and found.compilations:
            names = ", ".join(dict.fromkeys(each.function for each in found.compilations))
            self._note(f"compiled in {found.seconds:.1f} s, which no step counts: {names}")
        self._tell(step, found)
        return found.seconds

    def after_validation(self, step: int) -> None:
        """Look after the validation that follows a step."""
        self._tell(step, self.look(evaluating=True))

    def metrics(self) -> dict[str, float | int]:
        """Totals so far, by the names that they have in rows and results; nothing where nothing is compiled."""
        return {SECONDS: self.seconds, RECOMPILATIONS: self.surprises} if self._active else {}

    def look(self, *, evaluating: bool = False, first: bool = False) -> Found:
        """What was compiled since the last look.

        Args:
            evaluating: a validation was under way.
            first: a process's first step was.
        """
        records = self._new()
        named = [each for each in records if each.co_name]
        found = Found(
            seconds=_union((each.start_time_us, each.end_time_us) for each in records) / 1e6,
            compilations=tuple(self._judged(each, evaluating=evaluating, first=first) for each in named),
        )
        self._active = self._active or bool(named)
        self.seconds += found.seconds
        return found

    def _tell(self, step: int, found: Found) -> None:
        """The first surprise; the others are only counted."""
        for each in found.compilations:
            if each.surprise and self.surprises == 0:
                self._warn(
                    f"step {step}: {each.function} was compiled again: {each.reason or 'no reason given'}; "
                    f"further ones are counted as {RECOMPILATIONS}"
                )
            self.surprises += each.surprise

    def _judged(self, record: Any, *, evaluating: bool, first: bool) -> Compilation:
        place = (str(record.co_filename), int(record.co_firstlineno or 0))
        expected = place not in self._known
        self._known.add(place)
        if evaluating and place not in self._evaluated:
            self._evaluated.add(place)
            expected = True
        if first and any(part in _OWN for part in Path(place[0]).parts):
            expected = True
        return Compilation(
            function=f"{record.co_name} ({Path(place[0]).name}:{place[1]})",
            reason=_short(record.recompile_reason or ""),
            surprise=not expected,
        )

    def _new(self) -> list[Any]:
        """Records since the last call. Costs nothing while nothing has been compiled."""
        if "torch._dynamo.utils" not in sys.modules:
            return []
        from torch._dynamo import utils

        if self._limited:
            # By default torch keeps 64; of a first step there may be more.
            utils.set_compilation_metrics_limit(4096)
            self._limited = False
        records = list(utils.get_compilation_metrics())
        for index in range(len(records) - 1, -1, -1):
            if records[index] is self._last:
                del records[: index + 1]
                break
        if records:
            self._last = records[-1]
        return records


def _union(spans: Iterable[tuple[int | None, int | None]]) -> int:
    """Length of what the spans cover together: a backward may be compiled within a forward's span."""
    total, end = 0, 0
    for start, stop in sorted(_whole(spans)):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _whole(spans: Iterable[tuple[int | None, int | None]]) -> Iterator[tuple[int, int]]:
    return ((start, stop) for start, stop in spans if start is not None and stop is not None)


def _short(reason: str) -> str:
    """The first line of torch's reason, without the number of the version that did not fit."""
    line = reason.strip().partition("\n")[0]
    number, colon, rest = line.partition(": ")
    return (rest if colon and "/" in number else line).strip()
