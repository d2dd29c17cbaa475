"""The process that encodes for `watched_encoding.py`, which may end it at any time.

    python -m titanlab.data.encoding_worker FILE

A line of JSON in: [what, values]; one out: [whether it was given up, the result].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from titanlab.data.tokenizer import HuggingFaceTokenizer


def main() -> None:
    """Answer until the input ends."""
    path = Path(sys.argv[1])
    tokenizer = HuggingFaceTokenizer(path, path.read_bytes(), "tokenizer", watched=False)
    for line in sys.stdin.buffer:
        what, values = json.loads(line)
        result: Any = None
        try:
            result = tokenizer.decode(values) if what == "decode" else tokenizer.encode_many(values)
        # Oniguruma's limit on backtracking comes out of the library as a panic, which is no Exception.
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
        sys.stdout.write(json.dumps([result is None, result]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
