"""All uses of Hydra's private API, and their reasons. Other modules use the public API only.

- The parser of Hydra's flags: only `hydra.main` uses it, but a mistake in a flag has to become a ConfigError.
- The sources from which Hydra reads configs: Hydra has no public way to check a file before it is used, to read a
  file once for many compositions, or to replace a source. The classes here have the names of Hydra's own classes, so
  that Hydra does not register its own again and finds the source of schemas by its name.
- The names of Hydra's own sweeper and launcher: no public name tells them from those of plugins.
- The conversion of one value of a sweep: Hydra's public iterator returns it as it was parsed, with quotes.
- What `${group}` in a defaults list can refer to: Hydra collects it again for every file that it reads, which takes a
  fifth of a composition's time, and hardly any defaults list refers to a group.

Written for Hydra 1.3. Each part can go when Hydra makes the same function public.
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import Any, ClassVar

from hydra._internal import defaults_list
from hydra._internal.core_plugins import (
    file_config_source,
    importlib_resources_config_source,
    structured_config_source,
)
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from titanlab.errors import ConfigError
from titanlab.options import PLUS, Option, combination, combining_groups, discover
from titanlab.recipe.composition import strangers
from titanlab.recipe.composition.combinations import choice_of

_SCHEMA = "_schema"
# Before the names of the classes of Hydra's own sweeper and launcher, `_target_` in their configs.
_OWN_PLUGINS = "hydra._internal.core_plugins.basic_"
_hydras_choices = defaults_list._create_interpolation_map


def replace_sources() -> None:
    """Make Hydra read configs with the classes and functions of this file; a second call changes nothing."""
    defaults_list._create_interpolation_map = _choices_if_needed  # type: ignore[assignment]
    types = SourcesRegistry.instance().types
    types["file"] = FileConfigSource
    types["pkg"] = ImportlibResourcesConfigSource
    types["structured"] = StructuredConfigSource


def _choices_if_needed(overrides: Any, defaults: list[Any], self_added: bool) -> Any:  # noqa: FBT001 (Hydra's)
    """What Hydra's function returns, where an entry of a defaults list refers to it; else None, which nobody reads."""
    if any(entry.is_interpolation() for entry in defaults if not (self_added and entry.is_self())):
        return _hydras_choices(overrides, defaults, self_added)
    return None


def flag_parser() -> argparse.ArgumentParser:
    """A parser of Hydra's flags that raises errors and rejects abbreviations, whose meaning a new flag could change."""
    parser = get_args_parser()
    parser.exit_on_error = False
    parser.allow_abbrev = False
    return parser


def plain_value(value: Any) -> Any:
    """A parsed value of an override as a Python value: texts without quotes, also in lists and mappings."""
    return Override._convert_value(value)


def is_hydras_own(target: str) -> bool:
    """Whether the `_target_` of a sweeper or a launcher is a class of Hydra itself, and not of a plugin."""
    return target.startswith(_OWN_PLUGINS)


def folders_of(whole: DictConfig) -> list[ConfigSource]:
    """The folders and packages from which a composition took its options, in the order in which they were searched.

    Hydra's loader does not show those of `hydra.searchpath`, and its own folder and the schemas are left out.
    """
    kinds = SourcesRegistry.instance().types
    entries: Any = OmegaConf.to_container(whole.hydra.runtime.config_sources)
    return [
        kinds[entry["schema"]](entry["provider"], f"{entry['schema']}://{entry['path']}")
        for entry in entries
        if entry["schema"] in ("file", "pkg") and entry["provider"] != "hydra"
    ]


class FileConfigSource(file_config_source.FileConfigSource):
    """Folders of YAMLs, titanlab's and the user's. A process reads and checks a file once, until the file changes."""

    # The checked content of files, by provider, path, and the file's time and size.
    _results: ClassVar[dict[tuple[str, str, int, int], ConfigResult]] = {}

    def load_config(self, config_path: str) -> ConfigResult:
        """The content of a file, as a copy, because Hydra removes the defaults list from it."""
        file = os.path.join(self.path, self._normalize_file_name(config_path))
        try:
            status = os.stat(file)
        except OSError:
            # Hydra says what is wrong.
            return super().load_config(config_path)
        key = (self.provider, file, status.st_mtime_ns, status.st_size)
        if key not in self._results:
            strangers.check_size(file)
            result = self._loaded(config_path, file)
            content = OmegaConf.to_container(result.config, resolve=False)
            group, _, option = config_path.removesuffix(".yaml").rpartition("/")
            strangers.check_file(content, group, option, file)
            check_options(content, file)
            _name_combinations(result.config)
            self._results[key] = result
        return copy.deepcopy(self._results[key])

    def _loaded(self, config_path: str, file: str) -> ConfigResult:
        error = ConfigError("file", file, "has no keys with values, as an option has", "write KEY: VALUE, a key a line")
        try:
            result = super().load_config(config_path)
        except OSError as cause:
            if cause.errno is None:
                # OmegaConf raises it for a number.
                raise error from cause
            raise
        if not OmegaConf.is_dict(result.config):
            raise error
        return result


class ImportlibResourcesConfigSource(importlib_resources_config_source.ImportlibResourcesConfigSource):
    """Folders of YAMLs in packages. Reading one imports the package."""

    def __init__(self, provider: str, path: str) -> None:
        # A package after --config-path is the user's own decision, and is not checked.
        if provider.startswith("hydra.searchpath"):
            strangers.check_search_path([path])
        super().__init__(provider, path)


class StructuredConfigSource(structured_config_source.StructuredConfigSource):
    """Schemas, converted to configs when they are used. Hydra's store would convert all when they are registered.

    It also has the options that combine several of a group, and their schemas: `tracker/wandb+tensorboard`.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._schemas = {
            f"{group}/{option.schema_name}": option for group, kinds in discover().items() for option in kinds.values()
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> StructuredConfigSource:
        # Hydra copies its sources for every composition. A copy of the store would be slow, and would forget the
        # schemas that have been converted. What is read from the store is a copy, so that nothing changes the store.
        return self

    def is_config(self, config_path: str) -> bool:
        """Whether there is such a schema or combination."""
        return super().is_config(config_path) or _combination_at(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        """The config of a schema, which replaces the empty one that `recipes.register` has stored."""
        several = _combination_at(config_path)
        if several is not None:
            node: Any = several.schema
            if not config_path.removesuffix(".yaml").endswith(_SCHEMA):
                parts = [f"{part}@{part}" for part in str(several.kind).split(PLUS)]
                node = {"defaults": [several.schema_name, *parts, "_self_"]}
            where = f"{self.scheme()}://{self.path}"
            return ConfigResult(
                config=OmegaConf.structured(node), path=where, provider=self.provider, header={"package": None}
            )
        option = self._schemas.get(config_path.removesuffix(".yaml"))
        result = super().load_config(config_path)
        if option is not None and OmegaConf.get_type(result.config) is not option.schema:
            self.store.store(group=option.group, name=option.schema_name, node=option.schema)
            result = super().load_config(config_path)
        return result


def check_options(content: Any, file: str) -> None:
    """Check that the defaults list of a YAML chooses options by text: YAML reads `off` without quotes as false.

    Raises:
        ConfigError: it chooses a truth value or a number.
    """
    entries = content.get("defaults") if isinstance(content, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        for key, value in entry.items() if isinstance(entry, dict) else ():
            for option in value if isinstance(value, list) else [value]:
                if not isinstance(option, bool | int | float):
                    continue
                group = str(key).split()[-1].lstrip("/")
                words = ("off", "no") if option is False else ("on", "yes") if option is True else (str(option),)
                shown = str(option).lower()
                rule = f"chooses no option in the defaults of {file}: without quotes YAML reads {words[0]} as {shown}"
                if not isinstance(option, bool):
                    rule = f"chooses no option in the defaults of {file}: it is a number, and options have names"
                raise ConfigError(group, shown, rule, f'write {group}: "{words[0]}", with the quotes')


def _combination_at(path: str) -> Option | None:
    """The combination of options to which a path of a config leads; None: it leads to none."""
    group, _, name = path.removesuffix(".yaml").rpartition("/")
    return combination(group, name.removesuffix(_SCHEMA)) if PLUS in name else None


def _name_combinations(config: Any) -> None:
    """Replace each list of options in a file's defaults by the name of their combination, for groups that have some.

    Hydra would merge the options of a list into one config.
    """
    for entry in OmegaConf.select(config, "defaults") or []:
        # Unresolved: a value may refer to another group's choice, which only Hydra knows.
        options: Any = OmegaConf.to_container(entry, resolve=False) if OmegaConf.is_dict(entry) else {}
        for key, value in options.items():
            group = str(key).split()[-1].lstrip("/")
            if isinstance(value, list) and group in combining_groups() and value:
                entry[key] = choice_of(group, value)
