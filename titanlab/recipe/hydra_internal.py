"""Uses of Hydra's private API, each with its reason. Written for Hydra 1.3 and 1.4.

- The parser of Hydra's flags: only `hydra.main` has it, but a mistake in a flag has to become a ConfigError.
- The sources from which Hydra reads configs: titanlab checks a file before Hydra uses it. The classes here have the
  names of Hydra's classes. So Hydra does not register its own again, and finds the source of schemas by its name.
- The names of Hydra's own sweeper and launcher, and the conversion of one value of a sweep: no public API has these.

Other modules use the public API only. Each part can go when Hydra makes the same function public.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.resources
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins import (
    file_config_source,
    importlib_resources_config_source,
    structured_config_source,
)
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlab.errors import ConfigError
from titanlab.options import PLUS, combination, combining_groups, discover
from titanlab.recipe import strangers
from titanlab.recipe.keys import choice_of, load
from titanlab.recipe.recipe import schema_node

if not hydra.__version__.startswith(("1.3.", "1.4.")):
    cure = 'pip install "hydra-core>=1.3.2,<1.5"'
    raise ConfigError("hydra-core", hydra.__version__, "titanlab needs Hydra 1.3 or 1.4", cure)

VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
"""The argument `version_base`: Hydra 1.3 requires it, and 1.4 warns about it."""
_SCHEMA = "_schema"
# Prefix of the `_target_` of Hydra's own sweeper and launcher.
_OWN_PLUGINS = "hydra._internal.core_plugins.basic_"


def replace_sources() -> None:
    """Make Hydra read configs with titanlab's classes; a second call changes nothing."""
    types = SourcesRegistry.instance().types
    types["file"] = FileConfigSource
    types["pkg"] = ImportlibResourcesConfigSource
    types["structured"] = StructuredConfigSource


def flag_parser() -> argparse.ArgumentParser:
    """A parser of Hydra's flags that raises errors, and rejects abbreviations (new flags would make them ambiguous)."""
    parser = get_args_parser()
    parser.exit_on_error = False
    parser.allow_abbrev = False
    return parser


def plain_value(value: Any) -> Any:
    """A parsed value of an override as a Python value; texts lose their quotes, in lists and mappings too."""
    return Override._convert_value(value)


def is_hydras_own(target: str) -> bool:
    """Whether the `_target_` of a sweeper or a launcher is a class of Hydra itself, and not of a plugin."""
    return target.startswith(_OWN_PLUGINS)


class FileConfigSource(file_config_source.FileConfigSource):
    """Reads and checks the YAMLs of a folder, titanlab's or the user's."""

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        # Hydra's own method reports a missing file.
        return _read(self, config_path, file) if file.exists() else super().load_config(config_path)


class ImportlibResourcesConfigSource(importlib_resources_config_source.ImportlibResourcesConfigSource):
    """Reads and checks the YAMLs of a package, which may be an archive. Reading a YAML imports its package."""

    def __init__(self, provider: str, path: str) -> None:
        # A user may name any package with --config-path, but `hydra.searchpath` only packages with options.
        if provider.startswith("hydra.searchpath"):
            strangers.check_search_path([path])
        super().__init__(provider, path)

    def load_config(self, config_path: str) -> ConfigResult:
        file = importlib.resources.files(self.path).joinpath(self._normalize_file_name(config_path))
        return _read(self, config_path, file)


def _read(source: ConfigSource, config_path: str, file: Any) -> ConfigResult:
    """The checked content of a YAML. Texts stay as typed; a list of options becomes the name of their combination.

    Raises:
        ConfigError: the content is not a mapping, is too large, or has a setting that no config may have.
    """
    group, _, option = config_path.removesuffix(".yaml").rpartition("/")
    with file.open(encoding="utf-8") as stream:
        text = stream.read()
        strangers.check_size(text, file)
        header = ConfigSource._get_header_dict(text[:512])
        stream.seek(0)
        package = (header["package"] or "_group_").replace("_group_", group.replace("/", "."))
        values = load(stream, "" if package == "_global_" else package)
    if not isinstance(values, dict | None):
        raise ConfigError("file", file, "has no keys with values, as an option has", "write KEY: VALUE, a key a line")
    values = values or {}
    if source.provider != "hydra":
        strangers.check_file(values, group, option, file)
    for entry, key, chosen in strangers.chosen_groups(values, file):
        if chosen in combining_groups() and isinstance(entry[key], list) and entry[key]:
            # Hydra would merge the options of a list into one config.
            entry[key] = choice_of(chosen, entry[key])
    where = f"{source.scheme()}://{source.path}"
    return ConfigResult(config=OmegaConf.create(values), path=where, provider=source.provider, header=header)


class StructuredConfigSource(structured_config_source.StructuredConfigSource):
    """Gives Hydra the schemas, and the options that combine several options, such as `tracker/wandb+jsonl`.

    Schemas are converted when used. Hydra's store would convert all of them at once, and list them as options.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> StructuredConfigSource:
        # Hydra copies its sources for every composition: this source needs no copy.
        return self

    def is_config(self, config_path: str) -> bool:
        return super().is_config(config_path) or _schema_at(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        node = _schema_at(config_path)
        if node is None:
            return super().load_config(config_path)
        where = f"{self.scheme()}://{self.path}"
        return ConfigResult(config=node, path=where, provider=self.provider, header={"package": None})


def _schema_at(config_path: str) -> Any:
    """The config of the schema or combination at a path, as a copy that Hydra may change; None: nothing is there."""
    group, _, name = config_path.removesuffix(".yaml").rpartition("/")
    kind = name.removesuffix(_SCHEMA) if name != "schema" else None
    if PLUS in name:
        several = combination(group, str(kind))
        if several is None or name.endswith(_SCHEMA):
            return several and schema_node(several.schema)
        parts = [f"{part}@{part}" for part in str(several.kind).split(PLUS)]
        return OmegaConf.create({"defaults": [several.schema_name, *parts, "_self_"]})
    if not name.endswith("schema"):
        return None
    option = discover().get(group, {}).get(kind)
    return None if option is None or option.schema_name != name else copy.deepcopy(_schema(option.schema))


_schema = functools.cache(schema_node)


def check_hidden(sources: Iterable[Any], used: Callable[[], Iterable[str]]) -> None:
    """Check that no option of a composition hides a different option with the same name in a later folder.

    Otherwise the author of the hidden option would train another model or layout than they believe.

    Args:
        sources: the folders, as `hydra.runtime.config_sources` lists them.
        used: gives the paths of the composition's configs.
    """
    types = SourcesRegistry.instance().types
    given = [each for each in sources if each.schema in ("file", "pkg") and each.provider not in ("hydra", "schema")]
    folders = [types[each.schema](each.provider, f"{each.schema}://{each.path}") for each in given]
    first: dict[str, ConfigSource] = {}
    hidden: dict[str, list[ConfigSource]] = {}
    for folder in folders if len(folders) > 1 else ():
        root: Any = Path(folder.path) if folder.scheme() == "file" else importlib.resources.files(folder.path)
        for file in root.glob("*/**/*.yaml") if isinstance(root, Path) else ():
            path = file.relative_to(root).with_suffix("").as_posix()
            if first.setdefault(path, folder) is not folder and not path.startswith("hydra/"):
                hidden.setdefault(path, []).append(folder)
    for path in used() if hidden else ():
        others = (each for each in hidden.get(path, ()) if _content(each, path) != _content(first[path], path))
        if (unread := next(others, None)) is not None:
            group, _, option = path.partition("/")
            late, early = (
                each.path if each.scheme() == "file" else f"the package {each.path}" for each in (unread, first[path])
            )
            rule = f"{late}/{path}.yaml is never read: {early} has an option of that name"
            renamed = PurePath(option).with_name(f"my_{PurePath(option).name}")
            raise ConfigError(group, option, rule, f"rename the file, and choose {group}={renamed}")


def _content(source: ConfigSource, path: str) -> object:
    """The content and the header of an option's file; None if the file cannot be read."""
    try:
        result = source.load_config(path)
    except (ConfigError, HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError):
        return None
    return result.config, result.header
