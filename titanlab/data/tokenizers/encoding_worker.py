"""The process that encodes for `watched_encoding.py`, which may kill it at any time.

    python -m titanlab.data.tokenizers.encoding_worker

It reads lines of JSON from stdin: [method, values, seconds].
It answers each on stdout: ["done", the result], ["refused", [rule, cure]] or ["given up", ""].
"""

from __future__ import annotations

import json
import signal
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlab.data.tokenizers.tokenizer import HuggingFaceTokenizer
from titanlab.errors import ConfigError

# Seconds beyond the caller's limit after which the kernel ends this process: the caller may be gone.
_GRACE = 5.0
_RUN = 1000
_PLAIN = "The 1st line, it's naïve: 'x' == \"y\"\n\n  def f(x):\r\n\treturn {x: 中文}\n"


class _Worker:
    """One tokenizer; its public methods are those that a line of input can name."""

    _tokenizer: HuggingFaceTokenizer

    def load(self, path: str) -> list[Any]:
        """Read the tokenizer. Returns what `WatchedEncoding.load` does."""
        file = Path(path)
        self._tokenizer = HuggingFaceTokenizer(file, file.read_bytes(), "", watched=False)
        return [self._tokenizer.vocab_size, self._tokenizer.bos_id, self._tokenizer.eos_id, self._tokenizer.lacking]

    def probe(self, values: tuple[Sequence[str], float]) -> None:
        """Encode and decode text on which regular expressions are slow: long runs of one character.

        Args:
            values: the tokenizer's regular expressions, and the CPU seconds after which the kernel ends this process.
        """
        patterns, seconds = values
        # CPU time of all cores together, so that other load on the machine does not shorten the trial.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        characters = dict.fromkeys("a0 \n'=é中" + "".join(filter(str.isprintable, "".join(patterns))))
        runs = [character * _RUN for character in list(characters)[:40]]
        text = _PLAIN + "!".join([*runs, string.ascii_letters * 10, string.punctuation * 10])
        try:
            ids = self._tokenizer.encode(text)
        except ConfigError as error:
            if _is_given_up(error):
                raise
            # The tokenizer may not be able to encode this text. That is no fault: its corpus may not contain such text.
            ids = list(range(min(self._tokenizer.vocab_size, _RUN)))
        self._tokenizer.decode(ids)
        signal.setitimer(signal.ITIMER_PROF, 0)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer.encode_many(texts)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


def _is_given_up(error: ConfigError) -> bool:
    """Whether Oniguruma reached its limit on backtracking, which the tokenizers library reports as a panic."""
    return "retry-limit" in str(error.__cause__)


def main() -> None:
    """Answer requests until the input ends."""
    worker = _Worker()
    for line in sys.stdin.buffer:
        method, values, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE)
        answer: list[Any]
        try:
            answer = ["done", getattr(worker, method)(values)]
        except ConfigError as error:
            answer = ["given up", ""] if _is_given_up(error) else ["refused", [error.rule, error.cure]]
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
