"""The rule on a tokenizer's vocabulary, of whichever format its file is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError

# A letter, another one and what stands between words. A file of fewer is a damaged one.
_FEWEST_TOKENS = 3
# Ids without a token that a small vocabulary may have.
_UNUSED = 1000


def check_size(tokens: int, path: Path, key: str) -> None:
    """Hold a vocabulary to have enough tokens to write text.

    Raises:
        ConfigError: it has too few.
    """
    cure = "give the tokenizer.json of a model, or a .model"
    if not tokens:
        raise ConfigError(key, path, "has an empty vocabulary", cure)
    if tokens < _FEWEST_TOKENS:
        raise ConfigError(key, path, f"has {tokens} tokens, which write no text", cure)


def check_vocabulary(vocabulary: Mapping[str, int], description: Any, path: Path, key: str) -> None:
    """Hold a vocabulary to give each id to one token, to leave few ids without one, and to agree with its file.

    Args:
        vocabulary: id of each token, as the tokenizers library has it.
        description: the content of its tokenizer.json; None: there is none.
        path, key: for errors.

    Raises:
        ConfigError: it does not.
    """
    check_size(len(vocabulary), path, key)
    # The library numbers added tokens anew where their ids do not follow those of the others.
    for token in (description or {}).get("added_tokens", []):
        name, given, found = token["content"], token["id"], vocabulary.get(token["content"])
        if found != given:
            rule = f"gives its added token {name!r} the id {given}, and the tokenizers library gives it {found}"
            raise ConfigError(key, path, rule, "fetch the file again")
    names: dict[int, str] = {}
    for name, number in vocabulary.items():
        if names.setdefault(number, name) != name:
            raise ConfigError(key, path, f"gives the id {number} to two tokens", "fetch the file again")
    highest = max(names)
    if highest >= 2 * len(vocabulary) + _UNUSED:
        rule = f"has ids up to {highest} and only {len(vocabulary)} tokens: a model would need a row for every id"
        raise ConfigError(key, path, rule, "number the tokens from 0 without gaps")
