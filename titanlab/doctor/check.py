"""How checks run: at the same time, each with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from titanlab.terminal.finding import FAIL, WARN, Finding


@dataclass(frozen=True, kw_only=True)
class Check:
    """A function that finds something out, and how long it may take.

    Attributes:
        section: the part of the report.
        name: for the case that it does not answer.
        find: returns findings, or raises any error.
        seconds: its limit. A function that hangs, say in a file system that does not answer, is left alone.
        is_needed: whether training does not work without an answer.
    """

    section: str
    name: str
    find: Callable[[], Iterable[Finding]]
    seconds: float = 20.0
    is_needed: bool = True


def run_checks(checks: Sequence[Check]) -> Iterator[tuple[Check, list[Finding]]]:
    """Run all checks at the same time; give the findings of each in the order of the checks.

    No check takes longer than its limit, and no error of a check is raised.
    """
    started = [_Running(check) for check in checks]
    for running in started:
        yield running.check, running.findings()


class _Running:
    """A check in a thread of its own, which does not keep the process alive."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self._found: list[Finding] | None = None
        self._end = time.monotonic() + check.seconds
        self._thread = threading.Thread(target=self._run, name=f"check {check.name}", daemon=True)
        self._thread.start()

    def findings(self) -> list[Finding]:
        self._thread.join(max(0.0, self._end - time.monotonic()))
        if self._found is not None:
            return self._found
        text = f"gave no answer within {self.check.seconds:g} s"
        return [self._unknown(text, "it hangs: look for a network, a disk or a driver that does not answer")]

    def _run(self) -> None:
        try:
            self._found = list(self.check.find())
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._found = [self._unknown(f"could not be checked ({text})", "")]

    def _unknown(self, text: str, hint: str) -> Finding:
        state = FAIL if self.check.is_needed else WARN
        return Finding(name=self.check.name, state=state, text=text, hint=hint)
