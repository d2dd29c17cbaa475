"""Uses of Hydra's private API, and their reasons; `hydra_sources.py` and `hydra_loader.py` have the others.

- The parser of Hydra's flags: only `hydra.main` uses it, but a mistake in a flag has to become a ConfigError.
- The sources from which Hydra reads configs (`hydra_sources.py`), and what it does again for every composition
  (`hydra_loader.py`).
- The names of Hydra's own sweeper and launcher: no public name tells them from those of plugins.
- The conversion of one value of a sweep: Hydra's public iterator returns it as it was parsed, with quotes.

Other modules use the public API only. Written for Hydra 1.3. Each part can go when Hydra makes the same function
public.
"""

from __future__ import annotations

import argparse
from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override

from titanlab.recipe.composition import hydra_loader
from titanlab.recipe.composition.hydra_sources import (
    FileConfigSource,
    ImportlibResourcesConfigSource,
    StructuredConfigSource,
)

# Before the names of the classes of Hydra's own sweeper and launcher, `_target_` in their configs.
_OWN_PLUGINS = "hydra._internal.core_plugins.basic_"


def replace_sources() -> None:
    """Make Hydra read configs with titanlab's classes, and keep what it has read; a second call changes nothing."""
    hydra_loader.replace()
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
