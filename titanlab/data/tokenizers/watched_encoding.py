"""Reading and encoding in a process that is ended when it takes too long: for regular expressions of strangers.

The tokenizers library matches with Oniguruma, which backtracks: a pattern such as `(a+)+$` takes longer than anybody
waits, inside native code that nothing interrupts. Patterns that are known to be harmless need no such process;
`encoding_worker.py` is that process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titanlab.data.tokenizers.tiktoken_file import PATTERN
from titanlab.errors import ConfigError

# Seconds that one call may take: so many, and one more for so many characters or tokens.
SECONDS = 10.0
# Seconds for the start of the process, and one more for so many bytes of the tokenizer's file.
LOAD_SECONDS = 30.0
BYTES_PER_SECOND = 1 << 20
# Seconds of computing for a trial; usual expressions take a tenth of one.
TRIAL_SECONDS = 2.0
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
    """A tokenizer in another process.

    Args:
        path: the `tokenizer.json`.
        key: for errors.
        patterns: what is named when it takes too long.
    """

    def __init__(self, path: Path, key: str, patterns: Sequence[str]) -> None:
        self._path, self._key, self._patterns = path, key, patterns
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        # A thread reads ahead while another samples.
        self._lock = threading.Lock()

    def load(self) -> tuple[int, int | None, int | None]:
        """Tokens, beginning and end of text of the tokenizer, after each part of it has seen some text.

        Raises:
            ConfigError: it cannot be read, its vocabulary breaks a rule, or an expression takes too long.
        """
        tokens, bos_id, eos_id = self._ask("load", str(self._path.absolute()), 0, "while it is read")
        self._ask("probe", [self._patterns, TRIAL_SECONDS], 0, "in a trial")
        return tokens, bos_id, eos_id

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text.

        Raises:
            ConfigError: it takes too long, or the tokenizer cannot encode it.
        """
        units = sum(map(len, texts))
        found: list[list[int]] = self._ask("encode", list(texts), units, f"in {units} characters")
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids.

        Raises:
            ConfigError: it takes too long.
        """
        return str(self._ask("decode", [int(token) for token in ids], len(ids), f"in {len(ids)} tokens"))

    def _ask(self, what: str, values: Any, units: int, where: str) -> Any:
        if self._owner != os.getpid():
            # A reader that was forked off has a process of its own, and a lock that no other thread held then.
            self._process, self._owner, self._lock = None, os.getpid(), threading.Lock()
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                    if what != "load":
                        self._put("load", str(self._path.absolute()), 0, "while it is read")
                return self._put(what, values, units, where)
            except BaseException:
                # Also after Ctrl-C: an answer that nobody waits for must not be taken for that to the next question.
                if self._process is not None:
                    self._end()
                    self._process = None
                raise

    def _put(self, what: str, values: Any, units: int, where: str) -> Any:
        """The answer to one question."""
        assert self._process is not None
        seconds = SECONDS + units / UNITS_PER_SECOND
        if what == "load":
            seconds = LOAD_SECONDS + self._path.stat().st_size / BYTES_PER_SECOND
        try:
            answer = _answer(self._process, json.dumps([what, values, max(seconds, 0.0)]).encode() + b"\n", seconds)
        except TimeoutError as error:
            raise self._too_long(f"for more than {seconds:.0f} s {where}") from error
        except BrokenPipeError as error:
            # The kernel ends it so when the trial has taken its time.
            if self._process.wait() == -signal.SIGPROF:
                raise self._too_long(f"for more than {TRIAL_SECONDS:g} s of computing {where}") from error
            rule = "the process that encodes with it has ended, perhaps for lack of memory"
            raise ConfigError(self._key, self._path, rule, "give another tokenizer, or more memory") from error
        kind, result = json.loads(answer)
        if kind == "given up":
            # Oniguruma gives some matches up by itself.
            raise self._too_long(f"without end {where}")
        if kind == "refused":
            rule, cure = result
            raise ConfigError(self._key, self._path, rule, cure)
        return result

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "titanlab.data.tokenizers.encoding_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The library writes a page about each match that it gives up; making it takes longer than the match.
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RUST_BACKTRACE": "0"},
            # Ctrl-C is for whoever asked; without input it ends.
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, self._process, self._owner)

    def _too_long(self, how_long: str) -> ConfigError:
        rule = f"its regular expression {' or '.join(self._patterns)[:200]} backtracks {how_long}"
        return ConfigError(self._key, self._path, rule, "give a tokenizer with another pattern")


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
