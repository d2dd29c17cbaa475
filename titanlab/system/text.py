"""Formats numbers, paths, findings and foreign text for people."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_DATA_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_THOUSANDS = ("", "K", "M", "B", "T", "P", "E")


def grouped(value: float) -> str:
    """A whole number with separated thousands: 8,030,261,248."""
    return f"{value:,.0f}" if math.isfinite(value) else str(value)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: 1 run, 1,000 runs, 2 processes."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def data_size(count: float) -> str:
    """A number of bytes: 812 B, 1.5 KiB, 3.2 GiB."""
    unit = 0
    while count >= 1024 and unit < len(_DATA_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_DATA_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_DATA_UNITS[unit]}"


def short(value: float, *, digits: int = 3) -> str:
    """A count, rounded to significant digits, with K, M, B, …: 8.03B, 512, 16.8M, 1.00K."""
    if not math.isfinite(value):
        return str(value)
    power = 0
    while power < len(_THOUSANDS) - 1 and abs(float(f"{value / 1000**power:.{digits - 1}e}")) >= 1000:
        power += 1
    if power == 0 and float(value).is_integer():
        return str(int(value))
    return significant(value / 1000**power, digits) + _THOUSANDS[power]


def significant(value: float, digits: int = 3) -> str:
    """A number rounded to significant digits: 0.0123, 1.23, 123, 12300; a very large or small number as 1.23e+09."""
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{digits - 1}e}")
    if rounded == 0:
        return "0"
    if not 1e-6 <= abs(rounded) < 1e7:
        return f"{value:.{digits - 1}e}"
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(0, places)}f}"


def trimmed(value: float, digits: int = 3) -> str:
    """A number rounded to significant digits, without zeros at its end: 0.5, 12, 1800; `.3g` would write 1.8e+03."""
    text = significant(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def duration(seconds: float) -> str:
    """A duration in days, hours, minutes and seconds: 0:07, 12:30, 1:02:03, 3d 4:05:06."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def short_span(seconds: float) -> str:
    """A short duration in µs, ms or s: 812 µs, 12.3 ms, 1.23 s."""
    if not math.isfinite(seconds):
        return "?"
    # The rounded value selects the unit: 0.9999 s becomes 1.00 s, not 1000 ms.
    rounded = float(f"{seconds:.2e}")
    if rounded < 0.001:
        return f"{significant(seconds * 1e6)} µs"
    if rounded < 1:
        return f"{significant(seconds * 1e3)} ms"
    return f"{significant(seconds)} s"


def rate(value: float) -> str:
    """A learning rate or another small factor: 3.00e-04, 0."""
    return "0" if value == 0 else f"{value:.2e}"


def shown_path(path: object) -> str:
    """A path, relative if it is inside the current folder (links resolved); the address of a store stays as it is."""
    if isinstance(path, Path) and path.resolve().is_relative_to(Path.cwd()):
        return os.path.relpath(path)
    return str(path)


def sweep_argument(folder: Path) -> str:
    """The argument that names a sweep in a command to copy: its name if it is in `runs` here, else its folder."""
    if folder.absolute().parent == Path("runs").absolute():
        return shlex.quote(folder.name)
    shown = shown_path(folder)
    return shlex.quote(shown if os.sep in shown else os.path.join(os.curdir, shown))


# Sequences for colours and fonts are removed. Other sequences stay visible.
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
# Control characters of ASCII (but the tab) and Latin-1; characters that are invisible or change the text's direction.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def harmless(line: str) -> str:
    """One line, with each control character written as text: `^[` for an escape."""
    if line.isascii() and line.isprintable():
        return line
    return _CONTROL.sub(_shown, _COLOURS.sub("", line.rstrip("\r")))


def harmless_lines(text: str) -> str:
    """Several lines, each made harmless. JSON keeps its values: its strings contain no characters below U+0020."""
    return "\n".join(map(harmless, text.split("\n")))


def _shown(match: re.Match[str]) -> str:
    number = ord(match[0])
    # Write characters from 0x7f on as JSON escapes.
    return "^" + chr(number ^ 0x40) if number < 0x20 else f"\\u{number:04x}"


OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of a report of checks, such as that of `titanlab doctor`."""

    name: str
    state: str  # `ok`, `warn` (training works, perhaps worse), `fail` (training does not work)
    text: str
    hint: str = ""  # what to do about it; empty: nothing


def ok(name: str, text: str) -> Finding:
    return Finding(name=name, state=OK, text=text)


def warn(name: str, text: str, hint: str) -> Finding:
    return Finding(name=name, state=WARN, text=text, hint=hint)


def fail(name: str, text: str, hint: str) -> Finding:
    return Finding(name=name, state=FAIL, text=text, hint=hint)


def aligned(headings: Sequence[str], lines: Sequence[Sequence[str]], *, right: Iterable[str] = ()) -> list[str]:
    """A plain table as lines with aligned columns; columns without text are omitted."""
    lines = levelled(lines)
    shown = [place for place in range(len(headings)) if any(line[place] for line in lines)]
    widths = {place: max(len(line[place]) for line in [headings, *lines]) for place in shown}

    def line_of(texts: Sequence[str]) -> str:
        parts = [
            texts[place].rjust(widths[place]) if headings[place] in right else texts[place].ljust(widths[place])
            for place in shown
        ]
        return "  ".join(parts).rstrip()

    return [line_of(headings), *map(line_of, lines)]


def levelled(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """In columns with cells that end with `*`, add a space to the other cells, so that the digits are aligned."""
    marked = {place for line in lines for place, cell in enumerate(line) if cell.endswith("*")}
    return [
        [cell + " " if place in marked and cell and not cell.endswith("*") else cell for place, cell in enumerate(line)]
        for line in lines
    ]
