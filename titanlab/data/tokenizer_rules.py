"""Rules for the file of a tokenizer: for its vocabulary, and for the time that its regular expressions take.

The tokenizers library matches with Oniguruma, which backtracks: a pattern such as `(a+)+$` can take practically for
ever, in native code that cannot be interrupted. So patterns are tried in a process with a time limit, except those that
are known to be harmless.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.system import module_command

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
    """Check that no two tokens share an id, that few ids are unused, and that the vocabulary agrees with its file.

    Args:
        vocabulary: id of each token, as the tokenizers library has read it.
        description: the content of the tokenizer.json; None for other formats.

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


# Time limit of the process: SECONDS, plus one second for every BYTES_PER_SECOND bytes of the tokenizer's file.
SECONDS = 30.0
BYTES_PER_SECOND = 1 << 20
# CPU seconds for the trial itself; usual expressions take 0.1 s.
TRIAL_SECONDS = 2.0
# Exit code of the process if Oniguruma has reached its own limit on backtracking.
GIVEN_UP = 3
# Llama 3's pattern, from its `llama/tokenizer.py`.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KNOWN = frozenset(
    [
        PATTERN,
        # GPT-2, and files that spell its pattern out: https://github.com/openai/gpt-2/blob/master/src/encoder.py
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3.
        PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
        # cl100k: https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
        PATTERN.replace(r"\s*[\r\n]+|", r"\s*[\r\n]|"),
        PATTERN.replace(_CONTRACTIONS, r"'(?i:[sdmt]|ll|ve|re)"),
        # DeepSeek and other models first split the text with these.
        *(r"\p{N}{1,3}", r"\p{N}", r"[0-9]", r"\d", r"[\r\n]", r"\s", r" ", r" {2,}", r"\s+"),
    ]
)


def unknown_patterns(description: Any) -> list[str]:
    """Regular expressions in a `tokenizer.json` that are not known to be harmless."""
    return sorted({pattern for pattern in _patterns(description) if pattern not in KNOWN})


def _patterns(node: Any) -> Iterator[str]:
    # Skip the vocabulary and the added tokens: many entries, and no patterns.
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "Regex" and isinstance(value, str):
            yield value
        elif key not in ("model", "added_tokens"):
            yield from _patterns(value)


def try_patterns(path: Path, key: str, patterns: Sequence[str]) -> None:
    """In another process, read a `tokenizer.json` and encode and decode text on which regular expressions are slow.

    Raises:
        ConfigError: the process crashes, or an expression takes too long. Other errors are raised when this process
        reads the file.
    """
    seconds = SECONDS + path.stat().st_size / BYTES_PER_SECOND
    code = subprocess.run(
        [
            *module_command("titanlab.data.tokenizers"),
            *(str(path.absolute()), str(seconds), str(TRIAL_SECONDS)),
        ],
        stdin=subprocess.DEVNULL,
        # The library writes a long message about each match on which Oniguruma gives up.
        stderr=subprocess.DEVNULL,
        env={**os.environ, "RUST_BACKTRACE": "0"},
        check=False,
    ).returncode
    took_too_long = {
        GIVEN_UP: "without end",
        -signal.SIGPROF: f"for more than {TRIAL_SECONDS:g} s of computing",
        -signal.SIGALRM: f"for more than {seconds:.0f} s",
    }
    if code in took_too_long:
        rule = f"its regular expression {' or '.join(patterns)[:200]} backtracks {took_too_long[code]} in a trial"
        raise ConfigError(key, path, rule, "give a tokenizer with another pattern")
    if code:
        rule = f"a process that tries it ends with exit code {code}, perhaps for lack of memory"
        raise ConfigError(key, path, rule, "give another tokenizer, or more memory")
