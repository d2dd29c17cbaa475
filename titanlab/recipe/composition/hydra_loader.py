"""What titanlab replaces in Hydra's loader, which has no public way to any of it.

What Hydra does again for every composition is done once in a process, as long as configs have the same content. Hydra
reads and copies some forty configs for each composition, and merges them one into the other. Here a process keeps

- each config that it has read, until its content changes. Hydra gets copies where it changes them;
- the merged configs of a defaults list that is composed for the second time. Values that a command line or a point of a
  sweep sets are merged afterwards, so that compositions with other values share it.

What `${group}` in a defaults list can refer to, which Hydra collects for every file, is collected where a defaults list
refers to a group. And an option that another of the same name hides is refused, for every verb and flag.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any, ClassVar

import hydra
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

from titanlab.errors import ConfigError
from titanlab.recipe.composition.hidden_options import check_hidden
from titanlab.recipe.composition.hydra_sources import KnowsContent

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
        return self._result(config_path)[1]

    def content(self, config_path: str) -> Hashable | None:
        """A key of a config's content; None: its source cannot tell."""
        return self._result(config_path)[0]

    def _result(self, config_path: str) -> tuple[Hashable | None, ConfigResult | None]:
        if config_path not in self._results:
            self._results[config_path] = self._load(config_path)
        return self._results[config_path]

    def _load(self, config_path: str) -> tuple[Hashable | None, ConfigResult | None]:
        source = self.delegate._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
        key = None if source is None else _key(source, config_path)
        if key is None:
            return None, self.delegate.load_config(config_path)
        if key not in self._read:
            self._read[key] = self.delegate.load_config(config_path)
        # Where a schema has the name of a file, Hydra puts the two merged in the place of the config.
        return key, copy.copy(self._read[key])


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
    contents = [repo.content(str(default.config_path)) for default in defaults]
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

    Hydra copies the config when it puts it under a package; without a package it goes on with the config itself, and
    merges others into it.
    """
    return _hydras_load_single(self, default, repo if default.package else _Copies(repo))  # type: ignore[arg-type]


def _choices_if_needed(overrides: Any, defaults: list[Any], self_added: bool) -> Any:  # noqa: FBT001 (Hydra's)
    """What Hydra's function returns, where an entry of a defaults list refers to it; else None, which nobody reads."""
    if any(entry.is_interpolation() for entry in defaults if not (self_added and entry.is_self())):
        return _hydras_choices(overrides, defaults, self_added)
    return None


def _key(source: ConfigSource, config_path: str) -> Hashable | None:
    content = source.content(config_path) if isinstance(source, KnowsContent) else None
    return None if content is None else (type(source), source.provider, source.path, config_path, content)
