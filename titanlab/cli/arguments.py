"""Parses arguments and flags of the verbs, and sizes of files; errors are ConfigErrors."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from titanlab.errors import ConfigError
from titanlab.ranges import MOST_64_BITS, check_whole
from titanlab.system.files import user_path

_SHOW_PARSER = "--show-parser"
_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}IB": 1024**n for n, p in enumerate("KMGT", 1)}
_MOST_BYTES = 2.0**63  # file systems have signed 64-bit sizes


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors."""

    _command_line = ""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type in (Path, user_path) and not arg_string.strip():
            # As a path it would be the current folder, which nobody means.
            name = action.option_strings[0] if action.option_strings else action.dest
            raise ConfigError(name, arg_string, "names no file or folder", f"see `{self.prog} --help`")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError; argparse calls this for every mistake."""
        wrong = re.fullmatch(r"argument (\S+): invalid (int|float) value: '(.*)'", message, re.DOTALL)
        if wrong is not None:
            kind = "a whole number" if wrong[2] == "int" else "a number"
            raise ConfigError(wrong[1], wrong[3], f"must be {kind}", f"see `{self.prog} --help`")
        raise ConfigError("arguments", self._command_line, message, f"see `{self.prog} --help`")

    def print_help(self, file: Any = None) -> None:
        """Print the help; a disk that cannot take it raises, which argparse would hide."""
        print(self.format_help(), end="", file=file)


class FlagParser(_Parser):
    """Parses the flags of a verb that takes overrides of a recipe beside them, and prints a help of its own."""

    def __init__(self, verb: str) -> None:
        super().__init__(prog=f"titanlab {verb}", add_help=False, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the flags, and return what else there is; store the arguments for `error`."""
        self._command_line = " ".join(args or [])
        return super().parse_known_args(args, namespace)


class Arguments(_Parser):
    """Parses the arguments of a verb."""

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(prog=f"titanlab {verb}", description=description, allow_abbrev=False)
        self.add_argument(_SHOW_PARSER, action=_ShowParser, nargs=0, help=argparse.SUPPRESS)

    def options(self) -> dict[str, argparse.Action]:
        """The argparse actions of all options that the help shows, by name; an option may have several names."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return {name: action for action in shown for name in action.option_strings}

    def positionals(self) -> list[argparse.Action]:
        """The argparse actions of the positional arguments, in their order."""
        return [action for action in self._actions if not action.option_strings]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse options and positional arguments in any order; store the arguments for `error`."""
        self._command_line = " ".join(args or [])
        parsed = super().parse_intermixed_args(args, namespace)
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            if isinstance(value, int) and not isinstance(value, bool):
                name = action.option_strings[0] if action.option_strings else action.dest
                check_whole(name, value, MOST_64_BITS, cure=f"see `{self.prog} --help`")
        return parsed


def bytes_of(text: str, key: str) -> int:
    """The number of bytes in a text such as `5GB`, `500 MiB` or `1e9`.

    Raises:
        ConfigError: the text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not 1 <= float(match[1]) * unit < _MOST_BYTES:
        raise ConfigError(key, text, "is no size of a file", "try 5GB")
    return int(float(match[1]) * unit)


def parser_of(main: Callable[[Sequence[str]], int]) -> Arguments:
    """The parser of a verb, which stops after it has made the parser."""
    try:
        main([_SHOW_PARSER])
    except _ParserShown as shown:
        return shown.parser
    raise TypeError(f"{main.__module__} makes no parser")


class _ParserShown(Exception):
    """Ends a verb when its parser is wanted, and carries that parser."""

    def __init__(self, parser: Arguments) -> None:
        super().__init__()
        self.parser = parser


class _ShowParser(argparse.Action):
    """Raises the parser; like `--help`, it runs before argparse checks required arguments."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Arguments)
        raise _ParserShown(parser)


def check_number(key: str, value: int, most: int, usual: int) -> None:
    """Check that a flag's number lies in 1 to `most`.

    Raises:
        ConfigError: it does not.
    """
    if not 1 <= value <= most:
        raise ConfigError(key, value, f"must lie in 1 to {most}", f"try {usual}")
