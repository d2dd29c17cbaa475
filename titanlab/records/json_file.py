"""JSON files that may be damaged, or of another version: read, or refused in one line that names the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError

RESTORE = "restore that file, or the run's folder"
_KINDS = {str: "text", int: "a whole number", float: "a number", dict: "a mapping"}


def read_object(path: Path, *, cure: str = RESTORE) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no such file.

    Args:
        cure: what to do about a file that is damaged.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        rule = f"cannot be read ({error.strerror or type(error).__name__})"
        raise ConfigError("run", path, rule, "ask its owner for permission") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("run", path, f"is no JSON ({error})", cure) from error
    if not isinstance(value, dict):
        raise ConfigError("run", path, f"holds {type(value).__name__} and no object", cure)
    return value


def check_object(
    path: Path, value: Mapping[str, Any], *, schema: int, kinds: Mapping[str, Any], cure: str = RESTORE
) -> None:
    """Hold an object to the schema that is read here, and some of its keys to their types.

    Args:
        path: its file, for the error.
        kinds: type of each key; a tuple of a type and None for one that may be null. Keys may be missing.
        cure: what to do about a value of another type.

    Raises:
        ConfigError: another schema, or a value of another type.
    """
    if value.get("schema", schema) != schema:
        rule = f"{path} has schema {value['schema']}, and this version of titanlab reads schema {schema}"
        raise ConfigError("schema", value["schema"], rule, "use the version that made it")
    for key, kind in kinds.items():
        given = value.get(key)
        allowed, may_be_null = (kind[0], True) if isinstance(kind, tuple) else (kind, False)
        if key not in value or (given is None and may_be_null):
            continue
        fits = isinstance(given, (int, float) if allowed is float else allowed) and not isinstance(given, bool)
        if not fits:
            raise ConfigError(key, given, f"must be {_KINDS[allowed]} in {path}", cure)


def read_optional(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file that nothing depends on; None where it is missing or cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
