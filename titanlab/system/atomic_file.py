"""Writes files atomically: a reader never sees a part of one."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file atomically.

    Args:
        path: the file; its folder must exist.
        text: its whole new content, written as UTF-8.
        durable: also wait until the data is on the disk, so that it survives a power failure.
    """
    write_bytes(path, text.encode(), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace a file atomically, as `write_text` does; if this fails, the file is unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = False) -> None:
    """Replace a JSON file atomically; numbers that are not finite are written as null."""
    write_text(path, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n", durable=durable)


def finite(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON does not have, and lists for tuples."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value
