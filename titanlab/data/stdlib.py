"""data=stdlib: the source of the Python standard library as a corpus.

The functions are those that `titanlab.data.source` describes.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlab.data.corpus.text_files import Corpus
from titanlab.data.prepared import Prepared
from titanlab.data.stdlib_schema import Stdlib
from titanlab.data.streams.stream import Rows, Stream
from titanlab.data.tokenizers.tokenizer import Tokenizer
from titanlab.errors import ConfigError

# What others installed, what only some systems ship, and tables of characters, which teach nothing.
_LEFT_OUT = {
    "__pycache__",
    "__phello__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
# Written when this Python was built: it has paths of the machine that built it.
_BUILT = ("_sysconfigdata", "_sysconfig_vars")


def fingerprint(config: Stdlib) -> str:
    return _prepared(config).fingerprint


def prepare(config: Stdlib, *, report: Callable[[str], None]) -> None:
    _prepared(config).prepare(report)


def tokenizer(config: Stdlib) -> Tokenizer:
    return _prepared(config).load_tokenizer()


def vocab_size(config: Stdlib) -> int:
    return _prepared(config).index.vocab_size


def check(
    config: Stdlib, *, seq_len: int, global_batch: int, ranks: int, vocab_size: int, validation_sequences: int
) -> None:
    _prepared(config).check(seq_len=seq_len, vocab_size=vocab_size, validation_sequences=validation_sequences)


def open_train(config: Stdlib, **how: Any) -> Stream:
    return _prepared(config).open_train(**how)


def open_validation(config: Stdlib, **how: Any) -> Rows:
    return _prepared(config).open_validation(**how)


def source_files(folder: Path) -> tuple[Path, ...]:
    """Python files of a standard library, sorted by their path in it."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if each not in _LEFT_OUT and not each.startswith("config-"))
        found += [Path(place, file) for file in files if file.endswith(".py") and not file.startswith(_BUILT)]
    return tuple(sorted(found, key=lambda file: file.relative_to(folder).parts))


def _prepared(config: Stdlib) -> Prepared:
    folder = Path(sysconfig.get_path("stdlib"))
    files = source_files(folder)
    if not files:
        raise ConfigError(
            "data", "stdlib", f"this Python came without the source of its library ({folder})", "try data=files"
        )
    return Prepared(
        name="stdlib",
        corpus=Corpus(files=files, key="data", strict=False),
        tokenizer=config.tokenizer,
        vocab_size=config.vocab_size,
        validation_fraction=config.validation_fraction,
    )
