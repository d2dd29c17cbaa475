"""Encoding in a process of its own, which is ended when it takes too long: for regular expressions of strangers.

The tokenizers library matches with Oniguruma, which backtracks: a pattern such as `(a+)+$` takes longer than anybody
waits, inside native code that nothing interrupts. Patterns that are known to be harmless need no such process;
`encoding_worker.py` is that process.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titanlab.data.tiktoken_file import PATTERN
from titanlab.errors import ConfigError

# Seconds that one call may take: so many, and one more for so many characters or tokens.
SECONDS = 10.0
UNITS_PER_SECOND = 20_000
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KNOWN = frozenset(
    [
        # Llama 3.
        PATTERN,
        # GPT-2, and what writes it out: https://github.com/openai/gpt-2/blob/master/src/encoder.py
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3.
        PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
        # cl100k: https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
        PATTERN.replace(r"\s*[\r\n]+|", r"\s*[\r\n]|"),
        PATTERN.replace(_CONTRACTIONS, r"'(?i:[sdmt]|ll|ve|re)"),
        # DeepSeek and others split these off first.
        *(r"\p{N}{1,3}", r"\p{N}", r"[0-9]", r"\d", r"[\r\n]", r"\s", r" ", r" {2,}", r"\s+"),
    ]
)


def unknown_patterns(description: Any) -> list[str]:
    """Regular expressions in a `tokenizer.json` that are not known to be harmless."""
    return sorted({pattern for pattern in _patterns(description) if pattern not in KNOWN})


def _patterns(node: Any) -> Iterator[str]:
    # Its vocabulary has none, and a hundred thousand entries.
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "Regex" and isinstance(value, str):
            yield value
        elif key not in ("model", "added_tokens"):
            yield from _patterns(value)


class WatchedEncoding:
    """A tokenizer's encode and decode in another process, started with the first call.

    Args:
        path: the `tokenizer.json`.
        key: for errors.
        patterns: what is named when it takes too long.
    """

    def __init__(self, path: Path, key: str, patterns: Sequence[str]) -> None:
        self._path, self._key, self._patterns = path, key, patterns
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text.

        Raises:
            ConfigError: it takes too long.
        """
        found: list[list[int]] = self._ask("encode", list(texts), units=sum(map(len, texts)))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids.

        Raises:
            ConfigError: it takes too long.
        """
        return str(self._ask("decode", [int(token) for token in ids], units=len(ids)))

    def _ask(self, what: str, values: list[Any], *, units: int) -> Any:
        process = self._running()
        seconds = SECONDS + units / UNITS_PER_SECOND
        try:
            answer = _answer(process, json.dumps([what, values]).encode() + b"\n", seconds)
        except (TimeoutError, BrokenPipeError) as error:
            self._end()
            self._process = None
            raise (self._too_long(seconds, units) if isinstance(error, TimeoutError) else self._ended()) from error
        given_up, result = json.loads(answer)
        if given_up:
            raise self._too_long(None, units)
        return result

    def _running(self) -> subprocess.Popen[bytes]:
        """The process; a reader that was forked off has one of its own."""
        if self._process is None or self._owner != os.getpid():
            command = [sys.executable, "-m", "titanlab.data.encoding_worker", str(self._path)]
            # Ctrl-C is for whoever asked; without input it ends.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # The library writes a page about each match that it gives up.
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._owner = os.getpid()
            self._end = weakref.finalize(self, _end, self._process, self._owner)
        return self._process

    def _too_long(self, seconds: float | None, units: int) -> ConfigError:
        patterns = " or ".join(self._patterns)
        # Oniguruma gives some matches up by itself.
        time_taken = "without end" if seconds is None else f"for more than {seconds:.0f} s"
        rule = f"its regular expression {patterns[:200]} backtracks {time_taken} in {units} characters"
        return ConfigError(self._key, self._path, rule, "give a tokenizer with another pattern")

    def _ended(self) -> ConfigError:
        rule = "the process that encodes with it has ended, perhaps for lack of memory"
        return ConfigError(self._key, self._path, rule, "give another tokenizer, or more memory")


def _answer(process: subprocess.Popen[bytes], question: bytes, seconds: float) -> bytes:
    """What a process writes, up to the end of a line.

    Raises:
        TimeoutError: it takes longer.
        BrokenPipeError: it has ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    process.stdin.write(question)
    process.stdin.flush()
    answer = b""
    while not answer.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            raise TimeoutError
        part = os.read(process.stdout.fileno(), 1 << 20)
        if not part:
            raise BrokenPipeError
        answer += part
    return answer


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                # It held what the process did not take.
                continue
