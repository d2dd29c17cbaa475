"""The rule for names of runs and sweeps, which become names of folders."""

from __future__ import annotations

import re

from titanlab.errors import ConfigError

_LONGEST = 100
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST - 1}}}")


def check_name(key: str, value: str) -> None:
    """Check that a name can be the name of a folder.

    Raises:
        ConfigError: it has other characters, or too many.
    """
    if not _NAME.fullmatch(value):
        rule = f"becomes a folder's name: up to {_LONGEST} letters, digits, '.', '_' and '-'"
        raise ConfigError(key, value, rule, f"try {safe_name(value)}")


def safe_name(text: str, *, longest: int = _LONGEST, otherwise: str = "run") -> str:
    """A name like a text that fits the rule.

    Args:
        longest: how many characters it may have.
        otherwise: the name if no character of the text can stay.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:longest] or otherwise
