"""What titanlab uses of Hydra that is not public, and why. Everything else uses Hydra's public API.

- The parser of Hydra's flags. `hydra.main` keeps it to itself, and a mistake in a flag has to be one line of ours.
- The sources from which Hydra reads configs. Hydra offers no public way to check a file before it is used, to read a
  file once for many compositions, or to replace a source. The classes here have the names of Hydra's own: Hydra then
  takes them for registered already, and finds the source of schemas by its name.
- The conversion of one value of a sweep: Hydra's public iterator gives it as it was parsed.

Written for Hydra 1.3. Each part can go when Hydra makes the same public.
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import Any

from hydra._internal.core_plugins import (
    file_config_source,
    importlib_resources_config_source,
    structured_config_source,
)
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from titanlab.options import discover
from titanlab.recipe.composition import strangers


def replace_sources() -> None:
    """Have Hydra read configs by the classes of this file, from now on; a second call changes nothing."""
    types = SourcesRegistry.instance().types
    types["file"] = FileConfigSource
    types["pkg"] = ImportlibResourcesConfigSource
    types["structured"] = StructuredConfigSource


def flag_parser() -> argparse.ArgumentParser:
    """A parser of Hydra's flags that raises errors, and accepts whole names only.

    An abbreviation means one thing today, and another one after a flag has been added.
    """
    parser = get_args_parser()
    parser.exit_on_error = False
    parser.allow_abbrev = False
    return parser


def plain_value(value: Any) -> Any:
    """A parsed value of an override as Python has it: quoted texts without their quotes, also in lists and mappings."""
    return Override._convert_value(value)


class FileConfigSource(file_config_source.FileConfigSource):
    """Folders of YAMLs: titanlab's own and a person's. Each file is read and checked once."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._results: dict[str, ConfigResult] = {}

    def load_config(self, config_path: str) -> ConfigResult:
        """The content of a file; Hydra takes the defaults list out of it, so that everybody gets a copy."""
        if config_path not in self._results:
            result = super().load_config(config_path)
            content = OmegaConf.to_container(result.config, resolve=False)
            group, _, option = config_path.removesuffix(".yaml").rpartition("/")
            file = os.path.join(self.path, self._normalize_file_name(config_path))
            strangers.check_file(content, group, option, file)
            self._results[config_path] = result
        return copy.deepcopy(self._results[config_path])


class ImportlibResourcesConfigSource(importlib_resources_config_source.ImportlibResourcesConfigSource):
    """Folders of YAMLs in packages. To look into one imports the package."""

    def __init__(self, provider: str, path: str) -> None:
        # What a person types after --config-path is their own decision.
        if provider.startswith("hydra.searchpath"):
            strangers.check_search_path([path])
        super().__init__(provider, path)


class StructuredConfigSource(structured_config_source.StructuredConfigSource):
    """Schemas. Hydra's store makes a config of every schema when it is stored; here only of those that are used."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._schemas = {
            f"{group}/{option.schema_name}": option for group, kinds in discover().items() for option in kinds.values()
        }

    def load_config(self, config_path: str) -> ConfigResult:
        """The config of a schema, in place of the empty one that `recipes.register` has stored."""
        option = self._schemas.get(config_path.removesuffix(".yaml"))
        result = super().load_config(config_path)
        if option is not None and OmegaConf.get_type(result.config) is not option.schema:
            self.store.store(group=option.group, name=option.schema_name, node=option.schema)
            result = super().load_config(config_path)
        return result
