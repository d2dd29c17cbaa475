"""Parses sizes of files, such as `5GB`."""

from __future__ import annotations

import re

from titanlab.errors import ConfigError

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}IB": 1024**n for n, p in enumerate("KMGT", 1)}

_MOST = 2.0**63  # bytes; file systems have signed 64-bit sizes


def bytes_of(text: str, key: str) -> int:
    """The number of bytes in a text such as `5GB`, `500 MiB` or `1e9`.

    Raises:
        ConfigError: the text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not 1 <= float(match[1]) * unit < _MOST:
        raise ConfigError(key, text, "is no size of a file", "try 5GB")
    return int(float(match[1]) * unit)
