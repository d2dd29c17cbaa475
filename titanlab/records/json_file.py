"""Reads JSON files; a damaged file, or a file of another version, gives an error of one line that names the file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from titanlab.errors import ConfigError
from titanlab.system import parse_json, read_text

RESTORE = "restore that file, or the run's folder"
T = TypeVar("T")


def read_object(path: Path, *, cure: str = RESTORE) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file.

    Raises:
        ConfigError: the file cannot be read, or does not contain an object.
    """
    try:
        value = loaded(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        rule = f"cannot be read ({error.strerror or type(error).__name__})"
        raise ConfigError("run", path, rule, "ask its owner for permission") from error
    except ValueError as error:
        raise ConfigError("run", path, f"is no JSON ({error})", cure) from error
    if not isinstance(value, dict):
        raise ConfigError("run", path, f"holds {type(value).__name__} and no object", cure)
    return value


def read_typed(path: Path, kind: type[T], *, schema: int, cure: str = RESTORE) -> T | None:
    """The object in a JSON file as a dataclass; None if there is no file. Keys of a later version are left out.

    Args:
        schema: the number of the schema in the file, if it has one.
        cure: the error's advice about a damaged file.

    Raises:
        ConfigError: the file cannot be read, its schema differs, or a value has the wrong type.
    """
    value = read_object(path, cure=cure)
    return None if value is None else as_typed(path, value, kind, schema=schema, cure=cure)


def as_typed(path: Path, value: Mapping[str, Any], kind: type[T], *, schema: int, cure: str = RESTORE) -> T:
    """An object as a dataclass, as for `read_typed`."""
    # Imported here: the import takes time, and `titanlab --help` reads no records.
    import msgspec

    if value.get("schema", schema) != schema:
        rule = f"{path} has schema {value['schema']}, and this version of titanlab reads schema {schema}"
        raise ConfigError("schema", value["schema"], rule, "use the version that made it")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at ")
        if (missing := re.fullmatch(r"Object missing required field `(\w+)`", rule)) and not place:
            raise ConfigError(missing[1], None, f"is missing in {path}", cure) from error
        key = (re.findall(r"\w+", place.partition("$")[2]) or ["run"])[0]
        raise ConfigError(key, value.get(key), f"{rule[0].lower()}{rule[1:]} in {path}", cure) from error


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
    # JSON can escape a lone surrogate, which no terminal and no table can write.
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
