"""The rule for names of runs and sweeps, which become names of folders."""

from __future__ import annotations

import re

from titanlab.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(key: str, value: str) -> None:
    """Check that a name can be the name of a folder.

    Raises:
        ConfigError: it has other characters, or too many.
    """
    if not _NAME.fullmatch(value):
        rule = "becomes a folder's name: up to 100 letters, digits, '.', '_' and '-'"
        raise ConfigError(key, value, rule, f"try {_safe(value)}")


def _safe(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._")[:100] or "run"
