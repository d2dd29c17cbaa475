"""Flags of the verbs that take overrides of a recipe beside flags of their own."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from titanlab.errors import ConfigError


class Flags(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("arguments", " ".join(sys.argv[1:])[:80], message, f"see `{self.prog} --help`")


def check_number(key: str, value: int, most: int, usual: int) -> None:
    """Check that a flag's number lies in 1 to `most`.

    Raises:
        ConfigError: it does not.
    """
    if not 1 <= value <= most:
        raise ConfigError(key, value, f"must lie in 1 to {most}", f"try {usual}")
