"""Training of a tokenizer on a corpus: a SentencePiece BPE that decodes every text exactly."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from titanlab.data.text_schema import SMALLEST_VOCABULARY
from titanlab.errors import ConfigError

SAMPLE_CHARACTERS = 8_000_000
"""Characters of the text on which a tokenizer is trained; more text changes few merges and costs seconds."""
_SENTENCE_CHARACTERS = 4096


def train(texts: Iterable[str], *, vocab_size: int, file: Path) -> None:
    """Train a BPE on texts and write its `.model`.

    A character without a piece becomes byte tokens, and the text is not normalised: no space is added, removed or
    joined, so that `decode(encode(text)) == text` for any text.

    Args:
        texts: all are read; see `SAMPLE_CHARACTERS`.
        vocab_size: number of pieces, including 256 bytes and three special tokens.
        file: where to write the `.model`.

    Raises:
        ConfigError: the texts are too few, or have too many characters, for this vocabulary.
    """
    sentencepiece: Any = importlib.import_module("sentencepiece")
    model = io.BytesIO()
    failures: list[Exception] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts, failures),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=8 * _SENTENCE_CHARACTERS,
            minloglevel=3,
        )
    except RuntimeError as error:
        if failures:
            # Reading the texts failed; SentencePiece keeps only the message of that error.
            raise failures[0] from None
        raise _explained(str(error), vocab_size) from error
    file.write_bytes(model.getvalue())


def _sentences(texts: Iterable[str], failures: list[Exception]) -> Iterator[str]:
    # Longer than a line, so that line ends with the indentation after them become pieces; short enough to train fast.
    try:
        for text in texts:
            for start in range(0, len(text), _SENTENCE_CHARACTERS):
                yield text[start : start + _SENTENCE_CHARACTERS]
    except Exception as error:
        failures.append(error)
        raise


def _explained(message: str, vocab_size: int) -> ConfigError:
    key = "data.vocab_size"
    if match := re.search(r"value <= (\d+)", message):
        most = int(match.group(1))
        cure = f"try {most}, or give more text" if most >= SMALLEST_VOCABULARY else "give more text, or data.tokenizer"
        return ConfigError(key, vocab_size, f"the corpus is too small for it: it has {most} pieces", cure)
    if match := re.search(r"required_chars\. \d+ vs (\d+)", message):
        least = int(match.group(1))
        return ConfigError(key, vocab_size, f"the corpus has too many characters: it needs {least}", f"try {2 * least}")
    if "sentences_.empty()" in message:
        return ConfigError("data", "", "the corpus has no text to train a tokenizer on", "give files with text in them")
    return ConfigError(key, vocab_size, f"no tokenizer could be trained ({message[-200:]})", "name a data.tokenizer")
