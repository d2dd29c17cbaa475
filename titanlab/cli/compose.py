"""Hydra: from `key=value` arguments to recipes, with Hydra's own flags kept whole."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from titanlab.errors import ConfigError
from titanlab.options import conf_packages
from titanlab.recipe.composition.errors import ARGUMENTS, composition_errors
from titanlab.recipe.composition.flags import read_flags
from titanlab.recipe.composition.recipes import conf_folder, register, to_recipe
from titanlab.recipe.recipe import Recipe
from titanlab.sweep.study.hydra_loader import Loader

# What conf/config.yaml says of Hydra, for configs of other names: it makes no folder and no log.
_LEAVES_NOTHING = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


def compose(arguments: Sequence[str]) -> list[Recipe]:
    """The recipes that the arguments describe: one, or all points of a multirun in their order.

    None where Hydra itself answers: `--cfg`, `--info`, `--help`, completion and so on.

    Raises:
        ConfigError: the arguments describe no recipe, or one of the points is none.
    """
    register()
    given = read_flags(arguments)
    found: list[Recipe | ConfigError] = []

    def collect(config: DictConfig) -> None:
        # Nothing runs inside Hydra: every point is composed before one starts, and errors are told once, by us.
        try:
            with composition_errors(given.overrides):
                job = HydraConfig.get()
                found.append(to_recipe(config, job.runtime.choices, job.job.config_name))
        except ConfigError as error:
            found.append(error)

    with contextlib.ExitStack() as stack:
        first: Sequence[str] = ()
        if given.starts:
            own_primary = given.values["--config-name"] or given.values["--config-path"]
            if own_primary or given.values["--config-dir"] or conf_packages():
                # Files of others may set what would act while Hydra composes, such as where it writes a log.
                with composition_errors(given.overrides, given.values):
                    Loader(given, _of_one_value(given.overrides)).base()
            # Hydra keeps a multirun.yaml in the folder of a sweep, and ours has no such folder.
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="titanlab-"))
            first = [f"hydra.sweep.dir='{scratch}'", *(_LEAVES_NOTHING if own_primary else ())]
        stack.enter_context(_arguments([*first, *given.overrides, *given.flags]))
        stack.enter_context(_environment(HYDRA_FULL_ERROR="1"))
        stack.enter_context(composition_errors(given.overrides, given.values))
        with _quiet(), _without_schemas(shown=given.helps):
            hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")(collect)()
            for each in found:
                if isinstance(each, ConfigError):
                    raise each
    if given.starts and not found:
        raise ConfigError(ARGUMENTS, " ".join(given.overrides), "a launcher of Hydra's took the points", "leave it out")
    return [each for each in found if isinstance(each, Recipe)]


def _of_one_value(overrides: Sequence[str]) -> list[str]:
    """Overrides without those that sweep: what all points share."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [text for text, each in zip(overrides, parsed, strict=True) if not each.is_sweep_override()]


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
