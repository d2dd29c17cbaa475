"""Several options of one group at once: `tracker=[wandb,tensorboard]`.

Hydra merges the options of a list into one config. So a list is given to Hydra as one option, which combines them and
has each under its own key: `tracker/wandb+tensorboard` (`hydra_internal.StructuredConfigSource`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from titanlab.errors import ConfigError
from titanlab.options import combined_name, combining_groups, discover


def with_combinations(overrides: Sequence[str]) -> list[str]:
    """Overrides in which a list of a group's options is replaced by the name of their combination.

    Raises:
        ConfigError: a list has something else than names.
    """
    return [_combined(text) for text in overrides]


def choice_of(group: str, value: Any) -> str:
    """The name of an option, or of the combination of a list of options."""
    if group in combining_groups() and isinstance(value, list) and value:
        return combined_name(list(map(str, value)))
    return str(value)


def _combined(text: str) -> str:
    key, _, value = text.partition("=")
    group = key.lstrip("+")
    if not value.startswith("[") or group not in combining_groups():
        return text
    (override,) = OverridesParser.create().parse_overrides([text])
    options = override.value()
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        known = ", ".join(sorted(str(kind) for kind in discover()[group]))
        raise ConfigError(group, value, "is no list of options", f"known: {known}; for none: {group}=jsonl")
    return f"{key}={combined_name(list(map(str, options)))}"
