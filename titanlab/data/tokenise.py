"""`titanlab tokenize`: makes token shards for data=tokens."""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from titanlab.data import fingerprint
from titanlab.data.corpus.text_files import corpus_of
from titanlab.data.files_schema import Files
from titanlab.data.prepared import ORDER, content_of, make_shards
from titanlab.data.shards.index import Index
from titanlab.data.tokenizers import tokenizer as tokenizers
from titanlab.errors import ConfigError

# What the cures of data=files name, and what it is on the command line.
_CURES = {"data.tokenizer": "--tokenizer", "data.files=": "", "null to train one": "leave it out to train one"}


def write_token_shards(
    files: str,
    folder: Path,
    *,
    tokenizer: str | None = None,
    vocab_size: int = 32768,
    text_field: str = "text",
    validation_fraction: float = 0.01,
    report: Callable[[str], None],
) -> Index:
    """Tokenise files into a new folder of token shards, which appears complete or not at all.

    Args:
        files: a file, folder or glob, several separated by `:`; as in `files_schema.Files`.
        folder: the folder to make, with its parent; it may exist if it is empty.
        tokenizer: a `.model`, a `tokenizer.json` or a folder with one; None: train one on the files.
        vocab_size: of the tokenizer to train.
        text_field: key or column of the text in JSONL and parquet.
        validation_fraction: fraction of the documents to hold out.
        report: called with a line of progress now and then.

    Returns:
        The folder's index, with the number of tokens.

    Raises:
        ConfigError: the files, the tokenizer or the folder cannot be used; keys are `files`, `folder`,
            `--tokenizer`, `--text-field`, `--vocab-size` and `--validation-fraction`, as on the command line.
    """
    try:
        return _write(files, folder, tokenizer, vocab_size, text_field, validation_fraction, report)
    except ConfigError as error:
        # The checks of data=files name config keys; here the values come from the command line.
        if not error.key.startswith("data"):
            raise
        name = error.key.removeprefix("data").lstrip(".") or "files"
        key = name if name == "files" else "--" + name.replace("_", "-")
        cure = error.cure
        for text, here in _CURES.items():
            cure = cure.replace(text, here)
        raise ConfigError(key, error.value, error.rule, cure) from error


def _write(
    files: str,
    folder: Path,
    tokenizer: str | None,
    vocab_size: int,
    text_field: str,
    validation_fraction: float,
    report: Callable[[str], None],
) -> Index:
    config = Files(
        files=files,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        text_field=text_field,
        validation_fraction=validation_fraction,
    )
    corpus = corpus_of(config.files, text_field)
    corpus.check()
    tokenizer_fingerprint = None if config.tokenizer is None else tokenizers.load(Path(config.tokenizer)).fingerprint
    content = content_of(corpus)
    folder = folder.absolute()
    temporary = _beside(folder)
    try:
        index = make_shards(
            temporary,
            corpus,
            tokenizer=config.tokenizer,
            vocab_size=vocab_size,
            validation_fraction=validation_fraction,
            fingerprint=fingerprint.of_values(
                ORDER, content, text_field, tokenizer_fingerprint, vocab_size, validation_fraction
            ),
            report=report,
        )
        temporary.rename(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return index


def _beside(folder: Path) -> Path:
    """Make a temporary folder beside a folder, which must not exist or must be empty."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError("folder", folder, "is there already", "name another, or remove it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".{folder.name}.making-{secrets.token_hex(6)}")
        temporary.mkdir()
    except OSError as error:
        raise _unwritable(folder, error) from error
    return temporary


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    cure = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "name a folder you can write to"
    return ConfigError("folder", folder, f"cannot be written ({error.strerror or error})", cure)
