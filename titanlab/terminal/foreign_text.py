"""Makes text of other programs harmless for a terminal: it cannot move the cursor, or set colours and titles."""

from __future__ import annotations

import re

# Colours, and other settings of characters, are left out. Other sequences stay visible.
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
# Control characters but the tab; those of Latin-1; characters that turn the direction of text, or are invisible.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def harmless(line: str) -> str:
    """One line, in which each such character stands as text: `^[` for an escape."""
    if line.isascii() and line.isprintable():
        return line
    return _CONTROL.sub(_shown, _COLOURS.sub("", line.rstrip("\r")))


def harmless_lines(text: str) -> str:
    """Several lines, each of them harmless. JSON keeps its values: its strings have none of the first 32 characters."""
    return "\n".join(map(harmless, text.split("\n")))


def _shown(match: re.Match[str]) -> str:
    number = ord(match[0])
    # From 0x7f on as JSON escapes it.
    return "^" + chr(number ^ 0x40) if number < 0x20 else f"\\u{number:04x}"
