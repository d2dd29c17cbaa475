"""Makes new tokenizers: trains them on a corpus, or fetches them from the Hugging Face hub."""

from __future__ import annotations

import importlib
import io
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from titanlab.data import tokenizers
from titanlab.data.schema import SMALLEST_VOCABULARY
from titanlab.errors import ConfigError
from titanlab.system import check_reachable, hub_error, is_absent, write_bytes

SAMPLE_CHARACTERS = 8_000_000
"""Characters of the text on which a tokenizer is trained; more text changes few merges and costs seconds."""
_SENTENCE_CHARACTERS = 4096


def beginning(texts: Iterable[str]) -> Iterator[str]:
    """The first texts, until they have `SAMPLE_CHARACTERS` characters together."""
    left = SAMPLE_CHARACTERS
    for text in texts:
        yield text
        if (left := left - len(text)) <= 0:
            return


def train_sentencepiece(texts: Iterable[str], *, vocab_size: int, file: Path) -> None:
    """Train a BPE tokenizer on texts and write its `.model`.

    A character without a piece becomes byte tokens, and the text is not normalised: no space is added, removed or
    joined. So `decode(encode(text)) == text` for any text.

    Args:
        texts: all of them are read; the caller limits them to about `SAMPLE_CHARACTERS`.
        vocab_size: number of pieces (tokens), including 256 bytes and three special tokens.

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
            # The error comes from reading the texts. Raise that error, because SentencePiece keeps only its message.
            raise failures[0] from None
        raise _explained(str(error), vocab_size) from error
    file.write_bytes(model.getvalue())


def _sentences(texts: Iterable[str], failures: list[Exception]) -> Iterator[str]:
    # Cut texts into parts that are short enough for fast training, but longer than a line: a line end and the next
    # line's indentation can then become one piece.
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
        return ConfigError("data", "", "the corpus has no text to train a tokenizer on", "give files with text")
    return ConfigError(key, vocab_size, f"no tokenizer could be trained ({message[-200:]})", "name a data.tokenizer")


_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")
_NEEDED = ("tokenizer.json", "tokenizer.model")


def download_tokenizer(
    repo: str, folder: Path, token: str | None = None, *, report: Callable[[str], None] = lambda line: None
) -> Path:
    """Fetch the tokenizer of a model on the hub into a folder.

    Args:
        folder: created if missing. Files with the same names are replaced, after all files have been fetched.
        token: access token of the hub, for gated models; None: `HF_TOKEN` or the token that `hf auth login` saved.

    Returns:
        The tokenizer's file, for `data.tokenizer`.

    Raises:
        ConfigError: the hub cannot be reached, has no such model or tokenizer, or refuses the token.
    """
    if repo.count("/") > 1 or not repo.strip("/ "):
        raise ConfigError("repo", repo, "is not a model of the hub", "give <owner>/<model>, as in its address")
    check_reachable(repo)
    with tempfile.TemporaryDirectory(prefix="titanlab-tokenizer-") as temporary:
        fetched = [name for name in _FILES if _fetch(repo, name, Path(temporary), token, report)]
        needed = [name for name in _NEEDED if name in fetched]
        if not needed and _fetch(repo, tokenizers.ORIGINAL, Path(temporary), token, report):
            Path(temporary, tokenizers.ORIGINAL).rename(Path(temporary, "tokenizer.model"))
            fetched, needed = [*fetched, "tokenizer.model"], ["tokenizer.model"]
        if not needed:
            rule = f"has neither {' nor '.join(_NEEDED)}"
            raise ConfigError("repo", repo, rule, "name a model whose files include one of them")
        # Before any file is replaced, check that one of the fetched files loads as a tokenizer.
        for name in needed:
            try:
                tokenizers.load(Path(temporary, name), "repo")
                break
            except ConfigError as error:
                if name == needed[-1]:
                    raise ConfigError("repo", Path(str(error.value)).name, error.rule, error.cure) from error
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in fetched:
                write_bytes(folder / file, Path(temporary, file).read_bytes())
        except OSError as error:
            rule = f"cannot be written ({error.strerror})"
            raise ConfigError("--folder", folder, rule, "name a folder you can write to") from error
    tokenizer = tokenizers.load(folder / name, "folder")
    report(f"{folder / name}: {tokenizer.vocab_size:,} tokens")
    return folder / name


def _fetch(repo: str, name: str, folder: Path, token: str | None, report: Callable[[str], None]) -> bool:
    """Fetch one file; False if the model has no file of this name."""
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        hub.hf_hub_download(repo_id=repo, filename=name, local_dir=str(folder), token=token)
    # The library raises its own errors, those of its HTTP library and of the system; they share no base class.
    except Exception as error:
        if is_absent(error):
            return False
        raise hub_error(error, repo) from error
    report(f"fetched {name}")
    return True
