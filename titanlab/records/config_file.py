"""config.yaml of a run, written so that YAML 1.1 and YAML 1.2 readers get the same values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from titanlab.errors import ConfigError
from titanlab.records.yaml_excess import excess
from titanlab.system.regular_file import read_text

# libyaml reads eight times as fast, which matters in a table of a thousand runs; not every PyYAML has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes block style, keeps the order of fields, and quotes text that a reader could take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # Anchors such as `&id001` are hard to read.


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML reads 1e-5 as text, OmegaConf (like YAML 1.2) as a number; both read '1e-5' as text.
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
        yaml.representer.RepresenterError: a value is no plain value.
    """
    text: str = yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def read_config(path: Path) -> dict[str, Any]:
    """The values in a config.yaml.

    Raises:
        ConfigError: the file is missing, cannot be read, or has no mapping at its root.
    """
    try:
        text = read_text(path)
        if (reason := excess(text)) is not None:
            raise yaml.YAMLError(reason)
        config = yaml.load(text, Loader=_LOADER)
    except FileNotFoundError:
        raise ConfigError("run", path.parent, "has no config.yaml", "name the folder of a run") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        rule = f"its config.yaml cannot be read ({' '.join(str(error).split())})"
        raise ConfigError("run", path.parent, rule, "restore that file") from None
    if not isinstance(config, dict):
        raise ConfigError("run", path.parent, "its config.yaml holds no mapping", "restore that file")
    return config
