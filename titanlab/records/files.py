"""JSON and YAML in the folder of a run. A damaged file, or a file of another version, is an error of one line.

A config.yaml is written so that readers of YAML 1.1 and of YAML 1.2 get the same values. The sections of the configs of
a sweep (`training:` and its keys) are mostly equal, so writing and reading cache equal sections: a table of a thousand
runs takes a third of the time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import marshal
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import yaml

from titanlab.errors import ConfigError
from titanlab.system import parse_json, read_text, write_json

RESTORE = "restore that file, or the run's folder"
T = TypeVar("T")


def read_typed(path: Path, kind: type[T], *, schema: int, cure: str = RESTORE) -> T | None:
    """The object in a JSON file as a dataclass; None if there is no file. Unknown keys are ignored.

    Args:
        schema: the schema number that the file must have, if it has one.
        cure: the error's advice about a damaged file.

    Raises:
        ConfigError: the file cannot be read, its schema differs, or a value has the wrong type.
    """
    # Imported here: the import takes time, and `titanlab --help` reads no records.
    import msgspec

    try:
        value = loaded(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        rule = f"cannot be read ({error.strerror or type(error).__name__})"
        raise ConfigError("run", path, rule, "ask its owner for permission") from error
    except ValueError as error:
        raise ConfigError("run", path, f"is not JSON ({error})", cure) from error
    if not isinstance(value, dict):
        raise ConfigError("run", path, f"holds {type(value).__name__}, not an object", cure)
    if value.get("schema", schema) != schema:
        rule = f"{path} has schema {value['schema']}, and this version of titanlab reads schema {schema}"
        raise ConfigError("schema", value["schema"], rule, "use the version that made it")
    try:
        # `str_keys`: keys are always text in JSON; this converts them where a mapping has numbers as keys.
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at ")
        if (missing := re.fullmatch(r"Object missing required field `(\w+)`", rule)) and not place:
            raise ConfigError(missing[1], None, f"is missing in {path}", cure) from error
        key = (re.findall(r"\w+", place.partition("$")[2]) or ["run"])[0]
        raise ConfigError(key, value.get(key), f"{rule[0].lower()}{rule[1:]} in {path}", cure) from error


def write_typed(path: Path, record: Any, *, schema: int, durable: bool = False) -> None:
    """Write a dataclass for `read_typed`; numbers that are not finite become null."""
    write_json(path, {"schema": schema, **asdict(record)}, durable=durable)


def read_optional(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file that is not essential; None if the file is missing or cannot be read."""
    try:
        value = loaded(read_text(path))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def loaded(text: str) -> Any:
    value = parse_json(text)
    if "\\u" not in text:
        return value
    # JSON can escape a lone surrogate, which a terminal or a table cannot write: replace it.
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


# libyaml's loader is eight times as fast; not every PyYAML has libyaml.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The position before each line that begins in the first column.
_SECTION = re.compile(r"^(?=\S)", re.MULTILINE)
# Line breaks of Unicode that are not line breaks in YAML 1.2.
_BREAKS = re.compile("[\x85\u2028\u2029]")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*:( |$)")
# The most aliases inside anchors. Only such nested aliases multiply: 30 of them stand for at most some 60,000 copies.
MOST_ALIASES = 30
MOST_DEPTH = 200


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes block style, keeps the order of fields, and quotes texts that a reader could take for numbers."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # Anchors such as `&id001` are hard to read.


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = None
    with contextlib.suppress(ValueError):
        float(value.replace("_", ""))
        # PyYAML reads 1e-5 as text, OmegaConf (like YAML 1.2) as a number; both read '1e-5' as text.
        style = "'"
    if _BREAKS.search(value):
        # Only in double quotes PyYAML escapes these breaks; otherwise it would read them as spaces.
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
    return _dumped(marshal.loads(packed))


def _dumped(values: Mapping[str, Any]) -> str:
    text: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def read_config(path: Path) -> dict[str, Any]:
    """The values in a config.yaml. ConfigError: the file is missing, cannot be read, or has no mapping at its root."""
    try:
        text = read_text(path)
        # An item is None if its section must be read together with the rest of the file.
        sections = [_section(section) for section in _SECTION.split(text) if section]
        config: Any = {}
        for packed in sections:
            # A copy for each caller, because callers may change values.
            config |= {} if packed is None else marshal.loads(packed)
        if not sections or None in sections:
            config = parse_yaml(text)
    except FileNotFoundError:
        raise ConfigError("run", path.parent, "has no config.yaml", "name the folder of a run") from None
    except (OSError, ValueError) as error:
        rule = f"its config.yaml cannot be read ({' '.join(str(error).split())})"
        raise ConfigError("run", path.parent, rule, "restore that file") from None
    if not isinstance(config, dict):
        raise ConfigError("run", path.parent, "its config.yaml holds no mapping", "restore that file")
    return config


@functools.lru_cache(maxsize=4096)
def _section(text: str) -> bytes | None:
    """A section as a mapping of one key, packed by marshal; None if it may depend on other sections or is not plain."""
    lines = text.splitlines()
    # Leave anchors, tags, texts of several lines and comments, which are rare, to the parser of the whole file.
    is_plain = _KEY.match(lines[0]) and not any(character in text for character in '&*!|>%#"\t')
    for line in lines:
        is_closed = line.count("'") % 2 == 0 and all(
            line.count(pair[0]) == line.count(pair[1]) for pair in ("[]", "{}")
        )
        is_plain = is_plain and is_closed and (line is lines[0] or line.startswith("  "))
    if not is_plain:
        return None
    try:
        value = parse_yaml(text)
        return marshal.dumps(value) if isinstance(value, dict) and len(value) == 1 else None
    except ValueError:
        return None


def parse_yaml(text: str) -> Any:
    """The values of a YAML text, which may come from a stranger.

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
    """Why a YAML text is too large or too deep to read, in words; None if it can be read.

    libyaml's loader overflows the stack of the process on deep nesting (PyYAML 6), and nine lines with aliases (`&a`,
    `*a`) can stand for a billion values. The parser's events show depth and aliases before any value is made.
    """
    # Every level of nesting needs a bracket, or a further column of indentation.
    deepest = text.count("[") + text.count("{") + max(map(len, text.splitlines()), default=0)
    if deepest <= MOST_DEPTH and not ("&" in text and "*" in text):
        return None
    # The anchors of the collections that are open; None for a collection without an anchor.
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
