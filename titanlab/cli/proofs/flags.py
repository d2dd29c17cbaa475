"""Checks of flags that proofs and rehearsals have in common."""

from __future__ import annotations

from titanlab.errors import ConfigError


def check_number(key: str, value: int, most: int, usual: int) -> None:
    """Check that a flag's number lies in 1 to `most`.

    Raises:
        ConfigError: it does not.
    """
    if not 1 <= value <= most:
        raise ConfigError(key, value, f"must lie in 1 to {most}", f"try {usual}")
