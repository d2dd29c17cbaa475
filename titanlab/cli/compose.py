"""Hydra: from `key=value` arguments to recipes, with Hydra's own flags kept whole."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

import titanlab
from titanlab.cli.translate import composition_errors
from titanlab.options import conf_packages, discover
from titanlab.recipe import Recipe

Points = Callable[[list[Recipe]], None]


def compose(arguments: Sequence[str], start: Points) -> None:
    """Hand the recipes that the arguments describe to `start`: one, or all points of a multirun.

    `--cfg`, `--info`, `--help`, completion and so on are answered by Hydra itself, and nothing starts.

    Raises:
        ConfigError: the arguments describe no recipe.
    """
    register()

    def task(config: DictConfig) -> None:
        start([to_recipe(config)])

    task.__dict__["titanlab_start"] = start
    with _arguments(arguments), _environment(HYDRA_FULL_ERROR="1"), composition_errors(arguments):
        hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")(task)()


def register() -> None:
    """Make schemas, our launcher and the folders of other packages known to Hydra."""
    store = ConfigStore.instance()
    store.store(name="recipe_schema", node=Recipe)
    for group, kinds in discover().items():
        for found in kinds.values():
            store.store(group=group, name=found.schema_name, node=found.schema)
    store.store(group="hydra/launcher", name="titanlab", node={"_target_": f"{__name__}.{PointsLauncher.__name__}"})
    plugins = Plugins.instance()
    for plugin in (PointsLauncher, PackagesOnSearchPath):
        plugins.register(plugin)


def conf_folder() -> Path:
    """The folder of the config groups: beside the package in a clone, inside it in an installed wheel."""
    package = Path(titanlab.__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def to_recipe(config: DictConfig) -> Recipe:
    """A composed config as dataclasses; no DictConfig goes further than this."""
    recipe = OmegaConf.to_object(config)
    assert isinstance(recipe, Recipe)
    return recipe


class PointsLauncher(Launcher):
    """Composes all points of a multirun before any of them starts."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what `launch` needs."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Start the points; what becomes of each is in its own folder, so Hydra learns nothing more."""
        recipes = []
        for overrides in job_overrides:
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                del config["hydra"]
            with composition_errors(overrides):
                recipes.append(to_recipe(config))
        self.task_function.__dict__["titanlab_start"](recipes)
        return [
            JobReturn(overrides=list(overrides), _return_value=None, status=JobStatus.COMPLETED)
            for overrides in job_overrides
        ]


class PackagesOnSearchPath(SearchPathPlugin):
    """Adds the folders with which other packages extend our groups."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them behind our own."""
        for package in conf_packages():
            search_path.append(provider=package, path=f"pkg://{package}")


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
