"""Calls Hydra for `--cfg`, `--info`, `--help`, `--hydra-help` and the shell's completion, which start no run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence

import hydra
from omegaconf import DictConfig

from titanlab.errors import ConfigError
from titanlab.recipe.compose import conf_folder, register
from titanlab.recipe.flags import Flags
from titanlab.recipe.hydra_errors import ARGUMENTS, composition_errors
from titanlab.recipe.keys import as_typed, with_combinations
from titanlab.system.text import harmless_lines

# Flags in Hydra's help that titanlab refuses, with their explanations.
_REFUSED = re.compile(r"^--(?:shell-completion,.*?\n(?=--)|experimental-rerun.*?\n)", re.MULTILINE | re.DOTALL)
_COMPLETION = 'For TAB in the shell: eval "$(titanlab completion bash)"\n'


def answer(flags: Flags) -> None:
    """Print what Hydra prints for flags that start nothing.

    Raises:
        ConfigError: Hydra fails.
    """
    register()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(HYDRA_FULL_ERROR="1"))
        stack.enter_context(composition_errors(flags.overrides, flags.values))
        stack.enter_context(_arguments([*map(as_typed, with_combinations(flags.overrides)), *flags.flags]))
        with _quiet(), _whole_output(flags):
            hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")(_never_called)()


def _never_called(config: DictConfig) -> None:
    raise AssertionError("these flags start nothing")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Capture Hydra's standard error; if Hydra exits with an error, raise a ConfigError with the last line of it."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            yield
    except SystemExit as end:
        if end.code not in (None, 0):
            lines = captured.getvalue().strip().splitlines() or ["Hydra gave up"]
            raise ConfigError(ARGUMENTS, " ".join(sys.argv[1:]), lines[-1], "see `titanlab train --help`") from end
    sys.stderr.write(harmless_lines(captured.getvalue()))


@contextlib.contextmanager
def _whole_output(flags: Flags) -> Iterator[None]:
    """Capture Hydra's standard output and write it at the end: its loggers would print a traceback on a full disk.

    Schemas are removed from lists of options, because only YAML files name them.
    """
    captured = io.StringIO()
    try:
        with contextlib.redirect_stdout(captured):
            yield
    finally:
        text = captured.getvalue()
        if _REFUSED.search(text) is not None:
            text = _REFUSED.sub("", text) + _COMPLETION
        if flags.helps:
            text = re.sub(r"(?<=: )\w*schema, |, \w*schema\b", "", text)
        # A config that is written into a file is read again.
        sys.stdout.write(text if flags.shows_config and not sys.stdout.isatty() else harmless_lines(text))


@contextlib.contextmanager
def _arguments(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["titanlab train", *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
