"""config.yaml of a run, written so that YAML 1.1 and YAML 1.2 readers get the same values.

A YAML of a stranger is measured first: nine lines with aliases (`&a`, `*a`) can stand for a billion values, and
libyaml's loader overflows the stack of the process on deep nesting (PyYAML 6).
"""

from __future__ import annotations

import functools
import marshal
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from titanlab.errors import ConfigError
from titanlab.system.files import read_text

# libyaml reads eight times as fast, which matters in a table of a thousand runs; not every PyYAML has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Before each line that begins at its first column.
_SECTION = re.compile(r"^(?=\S)", re.MULTILINE)
# Line breaks of Unicode that are none in YAML 1.2.
_BREAKS = re.compile("[\x85\u2028\u2029]")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*:( |$)")
MOST_VALUES = 100_000
MOST_DEPTH = 200


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes block style, keeps the order of fields, and quotes text that a reader could take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # Anchors such as `&id001` are hard to read.


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML reads 1e-5 as text, OmegaConf (like YAML 1.2) as a number; both read '1e-5' as text.
    style = "'" if _looks_like_number(value) else None
    if _BREAKS.search(value):
        # PyYAML writes these breaks as they are between quotes of other styles, and reads them as spaces.
        style = '"'
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
    texts = []
    for key, value in config.items():
        try:
            # Version 2 has no references: equal values are equal bytes, and 1, 1.0 and True are three values.
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
        if (reason := excess(text)) is not None:
            raise yaml.YAMLError(reason)
        config = _by_sections(text)
        if config is None:
            config = yaml.load(text, Loader=_LOADER)
    except FileNotFoundError:
        raise ConfigError("run", path.parent, "has no config.yaml", "name the folder of a run") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
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
            # A copy for each caller: nobody shares what another may change.
            values.update(marshal.loads(packed))
    return values or None


@functools.lru_cache(maxsize=4096)
def _section(text: str) -> bytes | None:
    """A mapping of one key, packed; None for a section that may depend on others, or is written in another way."""
    lines = text.splitlines()
    plain = _KEY.match(lines[0]) and all(line.startswith("  ") for line in lines[1:])
    # Anchors, tags, texts of several lines, comments: rare, and not worth a special treatment.
    if not plain or any(character in text for character in '&*!|>%#"\t') or not all(map(_is_closed, lines)):
        return None
    try:
        value = yaml.load(text, Loader=_LOADER)
        return marshal.dumps(value) if isinstance(value, dict) and len(value) == 1 else None
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


def _is_closed(line: str) -> bool:
    """Whether no bracket or quote that a line opens is left open."""
    return line.count("'") % 2 == 0 and line.count("[") == line.count("]") and line.count("{") == line.count("}")


def excess(text: str) -> str | None:
    """What is too much in a YAML, in words; None if it can be read.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    if is_too_deep(text):
        return "it is nested too deeply"
    return "its aliases stand for too many values" if expands(text) else None


def is_too_deep(text: str) -> bool:
    """Whether a YAML is nested more than MOST_DEPTH deep.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    # Every level takes a bracket, or a column of a line.
    if text.count("[") + text.count("{") + max(map(len, text.splitlines()), default=0) <= MOST_DEPTH:
        return False
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            return True
    return False


def expands(text: str) -> bool:
    """Whether the values of a YAML are more than MOST_VALUES once each alias is replaced, or contain themselves.

    Args:
        text: not nested too deeply.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    if "&" not in text or "*" not in text:
        return False
    root = yaml.compose(text, Loader=_LOADER)
    sizes: dict[int, int] = {}
    # Nodes whose values are being counted, each with those of its nodes that are still to be visited.
    path = [(root, _inner(root))] if root is not None else []
    within = {id(root)}
    while path:
        node, left = path[-1]
        inner = next(left, None)
        if inner is None:
            sizes[id(node)] = 1 + sum(sizes[id(child)] for child in _inner(node))
            if sizes[id(node)] > MOST_VALUES:
                return True
            within.discard(id(node))
            path.pop()
        elif id(inner) in within:
            return True
        elif id(inner) not in sizes:
            within.add(id(inner))
            path.append((inner, _inner(inner)))
    return False


def _inner(node: Any) -> Iterator[Any]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
