"""Rules for the vocabulary of a tokenizer of any file format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError

# Two letters and a space. A file with fewer tokens is damaged.
_FEWEST_TOKENS = 3
# A small vocabulary may have this many ids without a token.
_UNUSED = 1000


def check_size(tokens: int, path: Path, key: str) -> None:
    """Check that a vocabulary has enough tokens to write text.

    Raises:
        ConfigError: it has too few.
    """
    cure = "give the tokenizer.json of a model, or a .model"
    if not tokens:
        raise ConfigError(key, path, "has an empty vocabulary", cure)
    if tokens < _FEWEST_TOKENS:
        raise ConfigError(key, path, f"has {tokens} tokens, which write no text", cure)


def check_vocabulary(vocabulary: Mapping[str, int], description: Any, path: Path, key: str) -> None:
    """Check that no two tokens of a vocabulary share an id, that few ids are unused, and that it agrees with its file.

    Args:
        vocabulary: id of each token, as the tokenizers library has read it.
        description: the content of the tokenizer.json; None for other formats.
        path, key: for errors.

    Raises:
        ConfigError: one of these rules is broken.
    """
    check_size(len(vocabulary), path, key)
    # The library gives added tokens new ids if their ids do not follow those of the other tokens.
    for token in (description or {}).get("added_tokens", []):
        name, declared, actual = token["content"], token["id"], vocabulary.get(token["content"])
        if actual != declared:
            rule = f"gives its added token {name!r} the id {declared}, and the tokenizers library gives it {actual}"
            raise ConfigError(key, path, rule, "fetch the file again")
    names: dict[int, str] = {}
    for name, number in vocabulary.items():
        if names.setdefault(number, name) != name:
            raise ConfigError(key, path, f"gives the id {number} to two tokens", "fetch the file again")
    highest = max(names)
    if highest >= 2 * len(vocabulary) + _UNUSED:
        rule = f"has ids up to {highest} and only {len(vocabulary)} tokens: a model would need a row for every id"
        raise ConfigError(key, path, rule, "number the tokens from 0 without gaps")
