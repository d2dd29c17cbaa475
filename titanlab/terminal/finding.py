"""One line of a report about a machine: what was checked, whether it works, and what to do if it does not."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was checked.
        state: `ok`, `warn` (training works, or works worse), `fail` (it does not work).
        text: what was found.
        hint: what to do about it; empty if nothing.
    """

    name: str
    state: str
    text: str
    hint: str = ""


def ok(name: str, text: str) -> Finding:
    """A line without fault."""
    return Finding(name=name, state=OK, text=text)


def warn(name: str, text: str, hint: str) -> Finding:
    """A line about something that works, or would work better."""
    return Finding(name=name, state=WARN, text=text, hint=hint)


def fail(name: str, text: str, hint: str) -> Finding:
    """A line about something that does not work."""
    return Finding(name=name, state=FAIL, text=text, hint=hint)
