"""Hydra: from `key=value` arguments to recipes, with Hydra's own flags kept whole."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

import titanlab
from titanlab.cli.flags import read_flags
from titanlab.cli.translate import ARGUMENTS, composition_errors, unknown_key
from titanlab.errors import ConfigError
from titanlab.options import conf_packages, discover
from titanlab.recipe import Recipe

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
                found.append(to_recipe(config))
        except ConfigError as error:
            found.append(error)

    with contextlib.ExitStack() as stack:
        first: Sequence[str] = ()
        if given.starts:
            # Hydra keeps a multirun.yaml in the folder of a sweep, and ours has no such folder.
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="titanlab-"))
            first = [f"hydra.sweep.dir='{scratch}'", *(_LEAVES_NOTHING if given.values["--config-name"] else ())]
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


def register() -> None:
    """Make schemas and the folders of other packages known to Hydra."""
    store = ConfigStore.instance()
    store.store(name="recipe_schema", node=Recipe)
    for group, kinds in discover().items():
        for found in kinds.values():
            store.store(group=group, name=found.schema_name, node=found.schema)
    Plugins.instance().register(PackagesOnSearchPath)


def conf_folder() -> Path:
    """The folder of the config groups: beside the package in a clone, inside it in an installed wheel."""
    package = Path(titanlab.__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def to_recipe(config: DictConfig) -> Recipe:
    """The config of Hydra's current job as dataclasses; no DictConfig goes further than this.

    Raises:
        ConfigError: a value breaks its schema's rule, a key that was added belongs to no schema, or a group's
            value was made without one.
    """
    job = HydraConfig.get()
    if OmegaConf.get_type(config) is not Recipe:
        name = job.job.config_name
        raise ConfigError("--config-name", name, "composes no recipe", "begin its defaults with recipe_schema")
    _hold_schemas(config, job.runtime.choices)
    recipe: Recipe = OmegaConf.to_object(config)  # type: ignore[assignment]
    _hold_kinds(recipe)
    _hold_keys(recipe, "")
    return recipe


class PackagesOnSearchPath(SearchPathPlugin):
    """Adds the folders with which other packages extend our groups."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them behind our own."""
        for package in conf_packages():
            search_path.append(provider=package, path=f"pkg://{package}")


def _hold_schemas(config: DictConfig, choices: Mapping[str, str]) -> None:
    """The rule that every group's value is of one of its schemas: others have no code."""
    for group, kinds in discover().items():
        if group not in config or OmegaConf.is_missing(config, group):
            continue
        if OmegaConf.get_type(config, group) not in [each.schema for each in kinds.values()]:
            names = " or ".join(f"[{each.schema_name}, _self_]" for each in kinds.values())
            rule = "is made without a schema of this group"
            raise ConfigError(group, choices.get(group), rule, f"begin its YAML with defaults: {names}")


def _hold_kinds(recipe: Recipe) -> None:
    """The rule that a group's `kind` is that of its schema: it is there for those who read a frozen recipe."""
    for group, kinds in discover().items():
        value = getattr(recipe, group, None)
        expected = next((each.kind for each in kinds.values() if each.schema is type(value)), None)
        given = getattr(value, "kind", expected)
        if given != expected:
            rule = f"says which schema the group has, and it has that of {expected}"
            raise ConfigError(f"{group}.kind", given, rule, f"leave it out, and choose with {group}=…")


def _hold_keys(node: Any, prefix: str) -> None:
    """The rule that a key belongs to a schema: `+key=value` adds others, which nothing would read."""
    fields = {field.name for field in dataclasses.fields(node)}
    for name, value in vars(node).items():
        if name not in fields:
            raise unknown_key(prefix + name, value)
        if dataclasses.is_dataclass(value):
            _hold_keys(value, f"{prefix}{name}.")


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
