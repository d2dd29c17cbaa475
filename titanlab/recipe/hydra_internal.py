"""Uses and replacements of Hydra's private API, each with its reason. Written for Hydra 1.3.

- The parser of Hydra's flags: only `hydra.main` uses it, but a mistake in a flag has to become a ConfigError.
- The sources from which Hydra reads configs: a file is checked before it is used, and an option that an earlier folder
  of the search path hides is refused. The classes have the names of Hydra's own, so that Hydra does not register its
  own again and finds the source of schemas by its name.
- What Hydra does again for every composition: it reads and copies some forty configs, merges them one into the other,
  and collects the choices that `${group}` in a defaults list can refer to. Here a process keeps what it has read and
  merged until its content changes. Values of a command line or a point of a sweep are merged afterwards.
- The names of Hydra's own sweeper and launcher, and the conversion of one value of a sweep: there is no public way.

Other modules use the public API only, except for the grammar of overrides in `keys.py`. Each part can go when Hydra
makes the same function public.
"""

from __future__ import annotations

import argparse
import copy
import importlib.resources
import itertools
import os
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any, ClassVar

import hydra
import yaml
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.core_plugins import (
    file_config_source,
    importlib_resources_config_source,
    structured_config_source,
)
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlab.errors import ConfigError
from titanlab.options import PLUS, Option, combination, combining_groups, discover
from titanlab.recipe import strangers
from titanlab.recipe.keys import choice_of, load
from titanlab.recipe.recipe import schema_node

# Before the names of the classes of Hydra's own sweeper and launcher, `_target_` in their configs.
_OWN_PLUGINS = "hydra._internal.core_plugins.basic_"


def replace_sources() -> None:
    """Make Hydra read configs with titanlab's classes, and keep what it has read; a second call changes nothing."""
    replace()
    types = SourcesRegistry.instance().types
    types["file"] = FileConfigSource
    types["pkg"] = ImportlibResourcesConfigSource
    types["structured"] = StructuredConfigSource


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


if not hydra.__version__.startswith("1.3."):
    cure = 'pip install "hydra-core>=1.3.2,<1.4" "omegaconf>=2.3,<2.4"'
    raise ConfigError("hydra-core", hydra.__version__, "titanlab needs Hydra 1.3", cure)
_Loader = config_loader_impl.ConfigLoaderImpl
_hydras_choices = defaults_list._create_interpolation_map
_hydras_load_single = _Loader._load_single_config
_hydras_compose = _Loader._compose_config_from_defaults_list
# A config takes 150 KB.
_MOST_COMPOSITIONS = 64


def replace() -> None:
    """Make Hydra's loader use what is defined here; a second call changes nothing."""
    config_loader_impl.CachingConfigRepository = Repository  # type: ignore[attr-defined]
    _Loader._load_single_config = _load_single  # type: ignore[method-assign]
    _Loader._compose_config_from_defaults_list = _composed  # type: ignore[method-assign]
    defaults_list._create_interpolation_map = _choices_if_needed  # type: ignore[assignment]


class Repository(CachingConfigRepository):
    """The configs of one composition, which finds the same content throughout, as with Hydra's class."""

    # What has been read, by source, path and content.
    _read: ClassVar[dict[Hashable, ConfigResult | None]] = {}

    delegate: Any

    def __init__(self, delegate: Any) -> None:
        super().__init__(delegate)
        self._results: dict[str, tuple[Hashable | None, ConfigResult | None]] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        """A config of which Hydra must change nothing; None: there is none."""
        return self.keyed(config_path)[1]

    def keyed(self, config_path: str) -> tuple[Hashable | None, ConfigResult | None]:
        """A config, and a key of its content; the key is None if its source cannot tell."""
        if config_path not in self._results:
            source = self.delegate._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
            key = None if source is None else _key(source, config_path)
            result = self._read.get(key)
            if result is None:
                result = self.delegate.load_config(config_path)
            if key is not None:
                self._read[key] = result
                # Where a schema has the name of a file, Hydra puts the two merged in the place of the config.
                result = copy.copy(result)
            self._results[config_path] = key, result
        return self._results[config_path]


class _Copies:
    """The part of a repository that Hydra merges from, with configs that it may change."""

    def __init__(self, repository: CachingConfigRepository) -> None:
        self._repository = repository

    def load_config(self, config_path: str) -> ConfigResult | None:
        return copy.deepcopy(self._repository.load_config(config_path))

    def get_schema_source(self) -> ConfigSource:
        return self._repository.get_schema_source()


# Merged configs by defaults list and contents, the latest used last; None where a list has been composed once. Most
# lists are composed once in a process, and no copy of those is kept: a copy takes 4 ms, and the merge 50.
_compositions: dict[Hashable, DictConfig | None] = {}


def _composed(self: Any, defaults: list[ResultDefault], repo: Any) -> DictConfig:
    """What Hydra's method returns: the configs of a defaults list, merged.

    Raises:
        ConfigError: the list has an option that differs from one of the same name in a later folder.
    """
    check_hidden(repo.get_sources(), [str(default.config_path) for default in defaults])
    contents = [repo.keyed(str(default.config_path))[0] for default in defaults]
    if None in contents:
        return _hydras_compose(self, defaults, repo)
    key = tuple((d.config_path, d.package, d.primary, content) for d, content in zip(defaults, contents, strict=True))
    known = key in _compositions
    merged = _compositions.pop(key, None)
    if merged is not None:
        _compositions[key] = merged
        return copy.deepcopy(merged)
    merged = _hydras_compose(self, defaults, repo)
    _compositions[key] = copy.deepcopy(merged) if known else None
    if len(_compositions) > _MOST_COMPOSITIONS:
        del _compositions[next(iter(_compositions))]
    return merged


def _load_single(self: Any, default: ResultDefault, repo: Any) -> ConfigResult:
    """What Hydra's method returns: a config under its package.

    Hydra copies the config when it puts it under a package; without one it merges others into the config itself.
    """
    return _hydras_load_single(self, default, repo if default.package else _Copies(repo))  # type: ignore[arg-type]


def _choices_if_needed(overrides: Any, defaults: list[Any], self_added: bool) -> Any:  # noqa: FBT001 (Hydra's)
    """What Hydra's function returns, where an entry of a defaults list refers to it; else None, which nobody reads."""
    if any(entry.is_interpolation() for entry in defaults if not (self_added and entry.is_self())):
        return _hydras_choices(overrides, defaults, self_added)
    return None


def _key(source: ConfigSource, config_path: str) -> Hashable | None:
    """A key that differs for other content; None: the source, of another package, cannot tell."""
    own = (FileConfigSource, ImportlibResourcesConfigSource, StructuredConfigSource)
    content = source.content(config_path) if isinstance(source, own) else None
    return None if content is None else (type(source), source.provider, source.path, config_path, content)


_SCHEMA = "_schema"


class FileConfigSource(file_config_source.FileConfigSource):
    """Folders of YAMLs, titanlab's and the user's."""

    def content(self, config_path: str) -> Hashable | None:
        """The file with its state."""
        return _state(self._file(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        """The content of a file, which is checked."""
        file = self._file(config_path)
        if _state(file) is None:
            # Hydra says what is wrong.
            return super().load_config(config_path)
        result = _read(self, config_path, Path(file))
        group, _, option = config_path.removesuffix(".yaml").rpartition("/")
        content = OmegaConf.to_container(result.config, resolve=False)
        strangers.check_file(content, group, option, file)
        strangers.check_settings(content, file)
        _name_combinations(result.config)
        return result

    def _file(self, config_path: str) -> str:
        return os.path.join(self.path, self._normalize_file_name(config_path))


class ImportlibResourcesConfigSource(importlib_resources_config_source.ImportlibResourcesConfigSource):
    """Folders of YAMLs in packages. Reading one imports the package."""

    def __init__(self, provider: str, path: str) -> None:
        # A package after --config-path is the user's own decision, and is not checked.
        if provider.startswith("hydra.searchpath"):
            strangers.check_search_path([path])
        super().__init__(provider, path)

    def content(self, config_path: str) -> Hashable | None:
        """The file with its state; None for a package in an archive."""
        file = self._file(config_path)
        return _state(str(file)) if isinstance(file, Path) else None

    def load_config(self, config_path: str) -> ConfigResult:
        """The content of a file."""
        result = _read(self, config_path, self._file(config_path))
        if self.provider != "hydra":
            content = OmegaConf.to_container(result.config, resolve=False)
            strangers.check_settings(content, f"{self.path}/{config_path}")
        return result

    def _file(self, config_path: str) -> Any:
        return importlib.resources.files(self.path).joinpath(self._normalize_file_name(config_path))


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

    def content(self, config_path: str) -> Hashable | None:
        """The schema of a combination, or the config in Hydra's store."""
        several = _combination_at(config_path)
        if several is not None:
            return several.schema
        self._convert(config_path)
        # The schemas of two packages may have one name.
        return (OmegaConf.get_type(self.store._load(self._normalize_file_name(config_path)).node),)

    def load_config(self, config_path: str) -> ConfigResult:
        """The config of a schema, which replaces the empty one that `compose.register` has stored."""
        several = _combination_at(config_path)
        if several is not None:
            node: Any = several.schema
            if not config_path.removesuffix(".yaml").endswith(_SCHEMA):
                parts = [f"{part}@{part}" for part in str(several.kind).split(PLUS)]
                node = {"defaults": [several.schema_name, *parts, "_self_"]}
            where = f"{self.scheme()}://{self.path}"
            return ConfigResult(config=schema_node(node), path=where, provider=self.provider, header={"package": None})
        self._convert(config_path)
        return super().load_config(config_path)

    def _convert(self, config_path: str) -> None:
        """Put the config of a schema into the store if it is not there, or is another package's."""
        option = self._schemas.get(config_path.removesuffix(".yaml"))
        if option is None:
            return
        stored = self.store._load(self._normalize_file_name(config_path)).node
        if OmegaConf.get_type(stored) is not option.schema:
            self.store.store(group=option.group, name=option.schema_name, node=schema_node(option.schema))


def _read(source: ConfigSource, config_path: str, file: Any) -> ConfigResult:
    """The content of a YAML, which may be in an archive.

    Raises:
        ConfigError: it is no mapping, or too large.
    """
    with file.open(encoding="utf-8") as stream:
        text = stream.read()
        strangers.check_size(text, file)
        header = ConfigSource._get_header_dict(text[:512])
        stream.seek(0)
        group = config_path.rpartition("/")[0].replace("/", ".")
        package = (header["package"] or "_group_").replace("_group_", group)
        values = load(stream, "" if package == "_global_" else package)
    if not isinstance(values, dict | None):
        raise ConfigError("file", file, "has no keys with values, as an option has", "write KEY: VALUE, a key a line")
    where = f"{source.scheme()}://{source.path}"
    return ConfigResult(config=OmegaConf.create(values or {}), path=where, provider=source.provider, header=header)


def _state(file: str) -> Hashable | None:
    """What changes with the content of a file, also if a person sets its time back; None if there is no file."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return file, status.st_dev, status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size


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


def check_hidden(sources: Sequence[ConfigSource], paths: Iterable[str]) -> None:
    """Check that no option of a composition hides a different one of its name in a later folder.

    The person who wrote the later one would otherwise train with another model or layout than they believe.
    """
    folders = [source for source in sources if source.scheme() in ("file", "pkg") and source.provider != "hydra"]
    for path in dict.fromkeys(paths):
        group, _, option = path.partition("/")
        if not option or group == "hydra" or len(folders) < 2:
            continue
        having = [source for source in folders if source.is_config(path)]
        for read, source in itertools.product(having[:1], having[1:]):
            if _content(source, path) != _content(read, path):
                file = f"{_place(source)}/{path}.yaml"
                rule = f"{file} is never read: {_place(read)} has an option of that name"
                renamed = PurePath(option).with_name(f"my_{PurePath(option).name}")
                raise ConfigError(group, option, rule, f"rename the file, and choose {group}={renamed}")


def _content(source: ConfigSource, path: str) -> object:
    """What an option says; None if its file cannot be read."""
    try:
        result = source.load_config(path)
    except (ConfigError, HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError):
        return None
    return result.config, result.header


def _place(source: ConfigSource) -> str:
    return source.path if source.scheme() == "file" else f"the package {source.path}"
