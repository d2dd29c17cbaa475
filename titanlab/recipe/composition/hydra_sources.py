"""The sources from which Hydra reads configs: folders of YAMLs, folders in packages, and schemas.

Hydra has no public way to check a file before it is used, to read a file once for many compositions, or to replace a
source. The classes here have the names of Hydra's own classes, so that Hydra does not register its own again and finds
the source of schemas by its name. `hydra_loader.py` keeps what they have read.
"""

from __future__ import annotations

import copy
import importlib.resources
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from hydra._internal.core_plugins import (
    file_config_source,
    importlib_resources_config_source,
    structured_config_source,
)
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from titanlab.errors import ConfigError
from titanlab.options import PLUS, Option, combination, combining_groups, discover
from titanlab.recipe.composition import strangers
from titanlab.recipe.composition.combinations import choice_of
from titanlab.recipe.composition.texts import load

_SCHEMA = "_schema"


@runtime_checkable
class KnowsContent(Protocol):
    """A source that can tell whether a config is still the one that it has read."""

    def content(self, config_path: str) -> Hashable | None:
        """A key of the content that `load_config` would return: another key for other content. None: it cannot tell."""
        ...


class Same:
    """A key that equals only the same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class FileConfigSource(file_config_source.FileConfigSource):
    """Folders of YAMLs, titanlab's and the user's. A process reads and checks a file once, until the file changes."""

    # What has been read and checked, by provider and content.
    _results: ClassVar[dict[tuple[str, Hashable], ConfigResult]] = {}

    def content(self, config_path: str) -> Hashable | None:
        """The file with its state."""
        return _state(self._file(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        """The content of a file, as a copy, because Hydra removes the defaults list from it."""
        file = self._file(config_path)
        state = _state(file)
        if state is None:
            # Hydra says what is wrong.
            return super().load_config(config_path)
        key = (self.provider, state)
        if key not in self._results:
            strangers.check_size(file)
            result = _read(self, config_path, Path(file))
            content = OmegaConf.to_container(result.config, resolve=False)
            group, _, option = config_path.removesuffix(".yaml").rpartition("/")
            strangers.check_file(content, group, option, file)
            _name_combinations(result.config)
            self._results[key] = result
        return copy.deepcopy(self._results[key])

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
        return _read(self, config_path, self._file(config_path))

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
            return Same(several.schema)
        self._convert(config_path)
        return Same(self.store._load(self._normalize_file_name(config_path)).node)

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
        self._convert(config_path)
        return super().load_config(config_path)

    def _convert(self, config_path: str) -> None:
        """Put the config of a schema into the store if it is not there, or is another package's."""
        option = self._schemas.get(config_path.removesuffix(".yaml"))
        if option is None:
            return
        stored = self.store._load(self._normalize_file_name(config_path)).node
        if OmegaConf.get_type(stored) is not option.schema:
            self.store.store(group=option.group, name=option.schema_name, node=option.schema)


def _read(source: ConfigSource, config_path: str, file: Any) -> ConfigResult:
    """The content of a YAML, which may be in an archive.

    Raises:
        ConfigError: it is no mapping.
    """
    with file.open(encoding="utf-8") as stream:
        header = ConfigSource._get_header_dict(stream.read(512))
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
