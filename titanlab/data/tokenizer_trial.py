"""The process that tries a tokenizer for `tokenizer_rules.py`.

python -m titanlab.data.tokenizer_trial FILE SECONDS TRIAL_SECONDS
"""

from __future__ import annotations

import json
import signal
import string
import sys
from collections.abc import Sequence
from pathlib import Path

from titanlab.data.tokenizer_rules import GIVEN_UP, unknown_patterns
from titanlab.data.tokenizers import HuggingFaceTokenizer, Tokenizer, content_of
from titanlab.errors import ConfigError

_RUN = 1000
_PLAIN = "The 1st line, it's naïve: 'x' == \"y\"\n\n  def f(x):\r\n\treturn {x: 中文}\n"


def probe(tokenizer: Tokenizer, patterns: Sequence[str]) -> None:
    """Encode and decode long runs of one character, on which regular expressions are slow.

    Raises:
        ConfigError: Oniguruma has given up, or the tokenizer cannot decode.
    """
    characters = dict.fromkeys("a0 \n'=é中" + "".join(filter(str.isprintable, "".join(patterns))))
    runs = [character * _RUN for character in list(characters)[:40]]
    text = _PLAIN + "!".join([*runs, string.ascii_letters * 10, string.punctuation * 10])
    try:
        ids = tokenizer.encode(text)
    except ConfigError as error:
        if _is_given_up(error):
            raise
        # The tokenizer may not be able to encode this text. That is no fault: its corpus may not contain such text.
        ids = list(range(min(tokenizer.vocab_size, _RUN)))
    tokenizer.decode(ids)


def _is_given_up(error: ConfigError) -> bool:
    """Whether Oniguruma reached its limit on backtracking, which the tokenizers library reports as a panic."""
    return "retry-limit" in str(error.__cause__)


def main() -> int:
    """Make the trial. The kernel ends this process when its time is over, also in native code."""
    path, seconds, trial_seconds = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    signal.setitimer(signal.ITIMER_REAL, seconds)
    content = content_of(path)
    try:
        tokenizer = HuggingFaceTokenizer(path, content, "", tried=True)
        # CPU time of all cores together, so that other load on the machine does not shorten the trial.
        signal.setitimer(signal.ITIMER_PROF, trial_seconds)
        probe(tokenizer, unknown_patterns(json.loads(content)))
    except ConfigError as error:
        return GIVEN_UP if _is_given_up(error) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
