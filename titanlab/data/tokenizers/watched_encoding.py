"""Encoding in another process with a time limit, for tokenizers with unknown regular expressions.

The tokenizers library matches with Oniguruma, which backtracks: a pattern such as `(a+)+$` can take practically for
ever, in native code that cannot be interrupted. Patterns that are known to be harmless need no other process. The
process runs `encoding_worker.py`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titanlab.data.tokenizers.tiktoken_file import PATTERN
from titanlab.errors import ConfigError
from titanlab.system.python_command import module_command

# Time limit of a call: SECONDS, and one second more for every UNITS_PER_SECOND characters or tokens.
SECONDS = 10.0
UNITS_PER_SECOND = 20_000
# Time limit of the start: LOAD_SECONDS, and one second more for every BYTES_PER_SECOND bytes of the tokenizer's file.
LOAD_SECONDS = 30.0
BYTES_PER_SECOND = 1 << 20
# CPU seconds for the trial; usual expressions take 0.1 s.
TRIAL_SECONDS = 2.0
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KNOWN = frozenset(
    [
        # Llama 3.
        PATTERN,
        # GPT-2, and files that spell its pattern out: https://github.com/openai/gpt-2/blob/master/src/encoder.py
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3.
        PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
        # cl100k: https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
        PATTERN.replace(r"\s*[\r\n]+|", r"\s*[\r\n]|"),
        PATTERN.replace(_CONTRACTIONS, r"'(?i:[sdmt]|ll|ve|re)"),
        # DeepSeek and other models split these off first.
        *(r"\p{N}{1,3}", r"\p{N}", r"[0-9]", r"\d", r"[\r\n]", r"\s", r" ", r" {2,}", r"\s+"),
    ]
)


def unknown_patterns(description: Any) -> list[str]:
    """Regular expressions in a `tokenizer.json` that are not known to be harmless."""
    return sorted({pattern for pattern in _patterns(description) if pattern not in KNOWN})


def _patterns(node: Any) -> Iterator[str]:
    # The vocabulary and the added tokens have no patterns, and too many entries to walk through.
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "Regex" and isinstance(value, str):
            yield value
        elif key not in ("model", "added_tokens"):
            yield from _patterns(value)


class WatchedEncoding:
    """A tokenizer in another process.

    Args:
        path: the `tokenizer.json`.
        key: for errors.
        patterns: named in the error when a call takes too long.
    """

    def __init__(self, path: Path, key: str, patterns: Sequence[str]) -> None:
        self._path, self._key, self._patterns = path, key, patterns
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        # The thread that reads data ahead and the thread that generates text both use it.
        self._lock = threading.Lock()

    def load(self) -> tuple[int, int | None, int | None, dict[str, str]]:
        """Vocabulary size, begin and end of a document, and special tokens that lack, after a trial of the expressions.

        Raises:
            ConfigError: it cannot be read, its vocabulary breaks a rule, or an expression takes too long.
        """
        loaded: tuple[int, int | None, int | None, dict[str, str]]
        loaded = self._ask("load", str(self._path.absolute()), 0, "while it is read")
        self._ask("probe", [self._patterns, TRIAL_SECONDS], 0, "in a trial")
        return loaded

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text.

        Raises:
            ConfigError: it takes too long, or the tokenizer cannot encode a text.
        """
        units = sum(map(len, texts))
        ids: list[list[int]] = self._ask("encode", list(texts), units, f"in {units} characters")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids.

        Raises:
            ConfigError: it takes too long.
        """
        return str(self._ask("decode", [int(token) for token in ids], len(ids), f"in {len(ids)} tokens"))

    def _ask(self, method: str, values: Any, units: int, where: str) -> Any:
        if self._owner != os.getpid():
            # After a fork the child starts a worker of its own, and needs a new lock: another thread may hold the old.
            self._process, self._owner, self._lock = None, os.getpid(), threading.Lock()
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                    if method != "load":
                        self._request("load", str(self._path.absolute()), 0, "while it is read")
                return self._request(method, values, units, where)
            except BaseException:
                # Also after Ctrl-C: otherwise the next request would read the answer to this one.
                if self._process is not None:
                    self._end()
                    self._process = None
                raise

    def _request(self, method: str, values: Any, units: int, where: str) -> Any:
        """Send one request and return the result."""
        assert self._process is not None
        seconds = SECONDS + units / UNITS_PER_SECOND
        if method == "load":
            seconds = LOAD_SECONDS + self._path.stat().st_size / BYTES_PER_SECOND
        try:
            answer = _answer(self._process, json.dumps([method, values, max(seconds, 0.0)]).encode() + b"\n", seconds)
        except TimeoutError as error:
            raise self._too_long(f"for more than {seconds:.0f} s {where}") from error
        except BrokenPipeError as error:
            # The kernel sends SIGPROF when the trial has used its CPU seconds.
            if self._process.wait() == -signal.SIGPROF:
                raise self._too_long(f"for more than {TRIAL_SECONDS:g} s of computing {where}") from error
            rule = "the process that encodes with it has ended, perhaps for lack of memory"
            raise ConfigError(self._key, self._path, rule, "give another tokenizer, or more memory") from error
        kind, result = json.loads(answer)
        if kind == "given up":
            # Oniguruma itself limits the backtracking of some matches.
            raise self._too_long(f"without end {where}")
        if kind == "refused":
            rule, cure = result
            raise ConfigError(self._key, self._path, rule, cure)
        return result

    def _start(self) -> None:
        self._process = subprocess.Popen(
            module_command("titanlab.data.tokenizers.encoding_worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The library writes a long message about each match that Oniguruma gives up, slower than the match itself.
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RUST_BACKTRACE": "0"},
            # Ctrl-C goes to the parent only; this process ends with its input.
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, self._process, self._owner)

    def _too_long(self, how_long: str) -> ConfigError:
        rule = f"its regular expression {' or '.join(self._patterns)[:200]} backtracks {how_long}"
        return ConfigError(self._key, self._path, rule, "give a tokenizer with another pattern")


def _answer(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> bytes:
    """Send a request to a process and read one line of answer.

    Raises:
        TimeoutError: the answer takes longer than `seconds`.
        BrokenPipeError: the process has ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    process.stdin.write(request)
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
                # The pipe still had data that the process did not read.
                continue
