"""Configs as keys of caches: a search asks thousands of times for what follows from one config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Key:
    """A config as the key of a cache. Configs of one class with the same text have the same key."""

    text: str
    value: Any


# Keys by the identity of their config, which stays in the entry, so that no other object can have its identity; and by
# class and text. Searches ask so often that even hashing a text anew would be seen.
_BY_IDENTITY: dict[int, tuple[Any, Key]] = {}
_BY_TEXT: dict[tuple[type, str], Key] = {}
_MOST_KEYS = 4096


def key_of(config: Any) -> Key:
    """The key of a config. Configs never change, and many recipes share one, so its text is made once."""
    entry = _BY_IDENTITY.get(id(config))
    return _new_key(config) if entry is None else entry[1]


def _new_key(config: Any) -> Key:
    if len(_BY_IDENTITY) >= _MOST_KEYS:
        # A later key with the same text is another one, for which caches are filled again.
        _BY_IDENTITY.clear()
        _BY_TEXT.clear()
    text = repr(config)
    key = _BY_TEXT.setdefault((type(config), text), Key(text, config))
    _BY_IDENTITY[id(config)] = config, key
    return key
