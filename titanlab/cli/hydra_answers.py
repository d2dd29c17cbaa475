"""What Hydra itself answers: `--cfg`, `--info`, `--help`, `--hydra-help` and the shell's completion."""

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
from titanlab.recipe.composition.errors import composition_errors
from titanlab.recipe.composition.flags import Flags
from titanlab.recipe.composition.hydra_texts import ARGUMENTS
from titanlab.recipe.composition.recipes import conf_folder, register


def answer(flags: Flags) -> None:
    """Print Hydra's answer to flags that start nothing.

    Raises:
        ConfigError: Hydra cannot answer.
    """
    register()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_arguments([*flags.overrides, *flags.flags]))
        stack.enter_context(_environment(HYDRA_FULL_ERROR="1"))
        stack.enter_context(composition_errors(flags.overrides, flags.values))
        with _quiet(), _without_schemas(shown=flags.helps):
            hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")(_never_called)()


def _never_called(config: DictConfig) -> None:
    raise AssertionError("these flags start nothing")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what Hydra writes to standard error; where it ends the process, tell the last line of it."""
    held = io.StringIO()
    try:
        with contextlib.redirect_stderr(held):
            yield
    except SystemExit as end:
        if end.code not in (None, 0):
            lines = held.getvalue().strip().splitlines() or ["Hydra gave up"]
            raise ConfigError(ARGUMENTS, " ".join(sys.argv[1:]), lines[-1], "see `titanlab train --help`") from end
    sys.stderr.write(held.getvalue())


@contextlib.contextmanager
def _without_schemas(*, shown: bool) -> Iterator[None]:
    """Leave schemas out of the help's lists of options: they are there for YAMLs to build on."""
    if not shown:
        yield
        return
    written = io.StringIO()
    try:
        with contextlib.redirect_stdout(written):
            yield
    finally:
        sys.stdout.write(re.sub(r"(?<=: )\w*schema, |, \w*schema\b", "", written.getvalue()))


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
