"""config.yaml of a run: plain values as text that every YAML reader understands alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from titanlab.errors import ConfigError

# libyaml reads eight times as fast, which tells in a table of a thousand runs; it is not in every PyYAML.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes block style, fields in their own order, and quotes what some reader might take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # `&id001` is no help to a person.


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML takes 1e-5 for text, OmegaConf (as YAML 1.2) for a number: quoted, it is text for both.
    style = "'" if _looks_like_number(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _looks_like_number(value: str) -> bool:
    try:
        float(value.replace("_", ""))
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _text)


def config_text(config: Mapping[str, Any]) -> str:
    """The YAML text of nested plain values.

    Raises:
        yaml.representer.RepresenterError: a value that is not plain.
    """
    text: str = yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def read_config(path: Path) -> dict[str, Any]:
    """The values in a config.yaml.

    Raises:
        ConfigError: it is missing, cannot be read, or holds no mapping.
    """
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except FileNotFoundError:
        raise ConfigError("run", path.parent, "has no config.yaml", "name the folder of a run") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        rule = f"its config.yaml cannot be read ({' '.join(str(error).split())})"
        raise ConfigError("run", path.parent, rule, "restore that file") from None
    if not isinstance(config, dict):
        raise ConfigError("run", path.parent, "its config.yaml holds no mapping", "restore that file")
    return config
