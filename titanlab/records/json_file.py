"""Reads JSON files; a damaged file, or a file of another version, gives an error of one line that names the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.system.files import parse_json, read_text

RESTORE = "restore that file, or the run's folder"
_KINDS = {str: "text", int: "a whole number", float: "a number", dict: "a mapping"}


def read_object(path: Path, *, cure: str = RESTORE) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file.

    Args:
        cure: the error's advice about a damaged file.

    Raises:
        ConfigError: the file cannot be read, or contains no object.
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


def check_object(
    path: Path, value: Mapping[str, Any], *, schema: int, kinds: Mapping[str, Any], cure: str = RESTORE
) -> None:
    """Check the number of an object's schema, and the types of some of its keys.

    Args:
        path: the object's file, for the error.
        kinds: type of each key; a tuple of a type and None if the value may be null. Keys may be missing.
        cure: the error's advice about a value of another type.

    Raises:
        ConfigError: the schema or the type of a value is another.
    """
    if value.get("schema", schema) != schema:
        rule = f"{path} has schema {value['schema']}, and this version of titanlab reads schema {schema}"
        raise ConfigError("schema", value["schema"], rule, "use the version that made it")
    for key, kind in kinds.items():
        entry = value.get(key)
        allowed, may_be_null = (kind[0], True) if isinstance(kind, tuple) else (kind, False)
        if key not in value or (entry is None and may_be_null):
            continue
        fits = isinstance(entry, (int, float) if allowed is float else allowed) and not isinstance(entry, bool)
        if not fits:
            raise ConfigError(key, entry, f"must be {_KINDS[allowed]} in {path}", cure)


def read_optional(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file that nothing depends on; None if the file is missing or cannot be read."""
    try:
        value = loaded(read_text(path))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def loaded(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON; see `parse_json`.
    """
    value = parse_json(text)
    if "\\u" not in text:
        return value
    # JSON can spell half of a surrogate pair, which no terminal and no table can write.
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
