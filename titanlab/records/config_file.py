"""config.yaml of a run, written so that YAML 1.1 and YAML 1.2 readers get the same values; and YAMLs of strangers."""

from __future__ import annotations

import contextlib
import functools
import marshal
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from titanlab.errors import ConfigError
from titanlab.system import read_text

# libyaml reads eight times as fast, which matters in a table of a thousand runs; not every PyYAML has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The position before each line that begins in the first column.
_SECTION = re.compile(r"^(?=\S)", re.MULTILINE)
# Unicode's line breaks that YAML 1.2 does not count as such.
_BREAKS = re.compile("[\x85\u2028\u2029]")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*:( |$)")
# Largest number of aliases inside anchors: only these multiply, and 30 cannot stand for more than some 60,000 copies.
MOST_ALIASES = 30
MOST_DEPTH = 200


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes block style, keeps the order of fields, and quotes text that a reader could take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # Anchors such as `&id001` are hard to read.


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = None
    with contextlib.suppress(ValueError):
        float(value.replace("_", ""))
        # PyYAML reads 1e-5 as text, OmegaConf (like YAML 1.2) as a number; both read '1e-5' as text.
        style = "'"
    if _BREAKS.search(value):
        # PyYAML writes these breaks as they are between quotes of other styles, and reads them as spaces.
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def config_text(config: Mapping[str, Any]) -> str:
    """The YAML text of nested plain values."""
    texts = []
    for key, value in config.items():
        try:
            # marshal's version 2 has no references: equal values give equal bytes, and 1, 1.0 and True differ.
            texts.append(_section_text(marshal.dumps({key: value}, 2)))
        except ValueError:
            texts.append(_dumped({key: value}))
    return "".join(texts) or _dumped({})


@functools.lru_cache(maxsize=4096)
def _section_text(packed: bytes) -> str:
    """The YAML text of a mapping of one key: the runs of a sweep differ in few of their sections."""
    return _dumped(marshal.loads(packed))


def _dumped(values: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def read_config(path: Path) -> dict[str, Any]:
    """The values in a config.yaml.

    Raises:
        ConfigError: the file is missing, cannot be read, or has no mapping at its root.
    """
    try:
        text = read_text(path)
        config = _by_sections(text)
        if config is None:
            config = parse_yaml(text)
    except FileNotFoundError:
        raise ConfigError("run", path.parent, "has no config.yaml", "name the folder of a run") from None
    except (OSError, ValueError) as error:
        rule = f"its config.yaml cannot be read ({' '.join(str(error).split())})"
        raise ConfigError("run", path.parent, rule, "restore that file") from None
    if not isinstance(config, dict):
        raise ConfigError("run", path.parent, "its config.yaml holds no mapping", "restore that file")
    return config


def _by_sections(text: str) -> dict[str, Any] | None:
    """The values of a YAML, read section by section; None if it must be read as a whole.

    The runs of a sweep differ in few of their sections (`training:` and its keys), and equal ones are parsed once: a
    table of a thousand runs takes a third of the time.
    """
    values: dict[str, Any] = {}
    for section in _SECTION.split(text):
        if section:
            packed = _section(section)
            if packed is None:
                return None
            # A copy for each caller, because callers may change values.
            values.update(marshal.loads(packed))
    return values or None


@functools.lru_cache(maxsize=4096)
def _section(text: str) -> bytes | None:
    """A mapping of one key, packed; None for a section that may depend on others, or that has another style."""
    lines = text.splitlines()
    plain = _KEY.match(lines[0]) and all(line.startswith("  ") for line in lines[1:])
    # Anchors, tags, texts of several lines, comments: rare, so leave them to the parser of the whole file.
    if not plain or any(character in text for character in '&*!|>%#"\t') or not all(map(_is_closed, lines)):
        return None
    try:
        value = parse_yaml(text)
        return marshal.dumps(value) if isinstance(value, dict) and len(value) == 1 else None
    except ValueError:
        return None


def _is_closed(line: str) -> bool:
    """Whether no bracket or quote that a line opens is left open."""
    return line.count("'") % 2 == 0 and line.count("[") == line.count("]") and line.count("{") == line.count("}")


def parse_yaml(text: str) -> Any:
    """The values of a YAML, which may come from a stranger.

    Raises:
        ValueError: the text is not YAML, or `yaml_excess` refuses it. The message is one line.
    """
    try:
        if (reason := yaml_excess(text)) is not None:
            raise ValueError(reason)
        return yaml.load(text, Loader=_LOADER)
    except (RecursionError, yaml.YAMLError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def yaml_excess(text: str) -> str | None:
    """Why a YAML is too large or too deep to read, in words; None if it can be read.

    libyaml's loader overflows the stack of the process on deep nesting (PyYAML 6), and nine lines with aliases (`&a`,
    `*a`) can stand for a billion values. The parser's events show both before anything is made.
    """
    # Every level needs a bracket, or a column of a line.
    deepest = text.count("[") + text.count("{") + max(map(len, text.splitlines()), default=0)
    if deepest <= MOST_DEPTH and not ("&" in text and "*" in text):
        return None
    # The anchors of the open collections.
    anchors: list[str | None] = []
    aliases = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            anchors.append(event.anchor)
            if len(anchors) > MOST_DEPTH:
                return "it is nested too deeply"
        elif isinstance(event, yaml.CollectionEndEvent):
            anchors.pop()
        elif isinstance(event, yaml.AliasEvent):
            aliases += any(anchors)
            if event.anchor in anchors:
                return "an alias in it stands for itself"
            if aliases > MOST_ALIASES:
                return f"it has more than {MOST_ALIASES} aliases inside of anchors"
    return None
