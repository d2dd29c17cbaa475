"""Monitoring of torch's compilations: their duration, and unexpected recompilations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# torch and torchao compile functions such as an optimizer's update once for each shape of a parameter.
_OWN = ("torch", "torchao")

SECONDS = "compile/seconds"
RECOMPILATIONS = "compile/recompilations"


@dataclass(frozen=True)
class Compilation:
    """One compilation of a function.

    Attributes:
        function: name and place, `forward (llama.py:130)`.
        reason: why existing compilations did not fit; empty for a function's first compilation.
    """

    function: str
    reason: str
    surprise: bool


class Watch:
    """Reads torch's records of compilations since it was made, and reports them.

    The first compilation of a function is expected, and so is one more when it is first called without gradients, as in
    validation. Any other compilation is a surprise: it costs seconds, and may happen in every step.

    Args:
        active: give metrics even before the first compilation.
        note: called with a line about expected compilations.
        warn: called with a line about the first surprise.
    """

    def __init__(
        self,
        *,
        active: bool = False,
        note: Callable[[str], None] = lambda line: None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._active, self._note, self._warn = active, note, warn
        # (file, first line, whether in a validation): without gradients torch compiles each function once more.
        self._known: set[tuple[str, int, bool]] = set()
        self._last: Any = None
        self._limited = True
        self.seconds = 0.0
        self.surprises = 0
        self._new()

    def after_step(self, step: int, *, first: bool) -> float:
        """Report the compilations of a step, and return their seconds; `first`: the first step of the process."""
        seconds, compilations = self.look(first=first)
        if first and compilations:
            names = ", ".join(dict.fromkeys(compilation.function for compilation in compilations))
            self._note(f"compiled in {seconds:.1f} s, which no step counts: {names}")
        self._report(step, compilations)
        return seconds

    def after_validation(self, step: int) -> None:
        self._report(step, self.look(evaluating=True)[1])

    def metrics(self) -> dict[str, float | int]:
        """Totals so far, by the names of metrics; empty if nothing is compiled."""
        return {SECONDS: self.seconds, RECOMPILATIONS: self.surprises} if self._active else {}

    def look(self, *, evaluating: bool = False, first: bool = False) -> tuple[float, list[Compilation]]:
        """The seconds of compilations since the last call, overlapping ones once, and the compilations in order.

        `evaluating`, `first`: whether a validation, or the first step of the process, has run since then.
        """
        records = self._new()
        compilations = [self._compilation(r, evaluating=evaluating, first=first) for r in records if r.co_name]
        seconds = _union((record.start_time_us, record.end_time_us) for record in records) / 1e6
        self._active = self._active or bool(compilations)
        self.seconds += seconds
        return seconds, compilations

    def _report(self, step: int, compilations: list[Compilation]) -> None:
        for compilation in compilations:
            if compilation.surprise and self.surprises == 0:
                reason = compilation.reason or "no reason given"
                self._warn(
                    f"step {step}: {compilation.function} was compiled again: {reason}; "
                    f"further ones are counted as {RECOMPILATIONS}"
                )
            self.surprises += compilation.surprise

    def _compilation(self, record: Any, *, evaluating: bool, first: bool) -> Compilation:
        place = (str(record.co_filename), int(record.co_firstlineno or 0), evaluating)
        expected = place not in self._known
        self._known.add(place)
        if first and any(part in _OWN for part in Path(place[0]).parts):
            expected = True
        return Compilation(
            function=f"{record.co_name} ({Path(place[0]).name}:{place[1]})",
            reason=_short(record.recompile_reason or ""),
            surprise=not expected,
        )

    def _new(self) -> list[Any]:
        """Records since the last call. It does nothing until torch's compiler is imported."""
        if "torch._dynamo.utils" not in sys.modules:
            return []
        from torch._dynamo import utils

        if self._limited:
            # torch keeps 64 by default; a first step may have more.
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
    """Length of the union of spans: a backward may be compiled within a forward's span."""
    total, end = 0, 0
    for start, stop in sorted((start, stop) for start, stop in spans if start is not None and stop is not None):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _short(reason: str) -> str:
    """The first line of torch's reason, without the number of the compilation that did not fit."""
    line = reason.strip().partition("\n")[0]
    number, colon, rest = line.partition(": ")
    return (rest if colon and "/" in number else line).strip()
