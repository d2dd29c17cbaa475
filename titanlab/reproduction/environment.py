"""How the environment of a run differs from the present one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,99}")
# They differ between any two runs, or name the job.
_OWN = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
_LONGEST = 60
Difference = tuple[str, str, str]


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Name, value then, value now, of everything that differs."""
    return list(_differences(then, now))


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    for section, keys in {
        "python": ("version", "implementation"),
        "devices": ("accelerator", "name", "count"),
        "platform": ("system", "machine", "libc", "release", "nvidia_driver"),
        "host": ("name", "cpu", "usable_cores", "memory_gib"),
    }.items():
        old, new = _mapping(then, section), _mapping(now, section)
        for key in keys:
            if key in old and old[key] != new.get(key):
                yield f"{section}.{key}", _text(old[key]), _text(new.get(key))
    for section in ("packages", "environment"):
        old, new = _mapping(then, section), _mapping(now, section)
        for name in sorted({*old, *new}, key=str):
            if str(name).startswith(_OWN) or old.get(name) == new.get(name):
                continue
            yield str(name)[:_LONGEST], _text(old.get(name)), _text(new.get(name))


def pip_line(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The command that installs the packages that differ; None: none differs, or they cannot be named safely."""
    old, new = _mapping(then, "packages"), _mapping(now, "packages")
    words = [
        f"{name}=={version}"
        for name, version in sorted(old.items(), key=str)
        if isinstance(name, str)
        and isinstance(version, str)
        and _NAME.fullmatch(name)
        and _VERSION.fullmatch(version)
        and new.get(name) != version
    ]
    return f"pip install {' '.join(words)}" if words else None


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    text = "-" if value is None else " ".join(str(value).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
