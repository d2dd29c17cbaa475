"""data=hf: any dataset that Hugging Face `datasets` streams, such as C4.

The functions are those that `titanlab.data.source` describes.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from titanlab.data import cache
from titanlab.data import fingerprint as fingerprints
from titanlab.data.corpus.held_out import is_held_out
from titanlab.data.corpus.text_files import matching
from titanlab.data.hf_schema import LOCAL_BUILDERS, HuggingFace
from titanlab.data.prepared import train_tokenizer
from titanlab.data.rules import hold_streams, hold_validation, hold_vocabulary
from titanlab.data.shards.index import Index, is_whole, read_index
from titanlab.data.streams.stream import Report, Rows, State, Stream
from titanlab.data.tokenizers import tokenizer as tokenizers
from titanlab.data.tokenizers.tokenizer import Tokenizer
from titanlab.errors import ConfigError

ORDER = 1
"""Raised when the same dataset would give other tokens, or the same tokens in another order."""


def fingerprint(config: HuggingFace) -> str:
    return fingerprints.of_values(_content(config), config.streams)


def prepare(config: HuggingFace, *, report: Callable[[str], None]) -> None:
    # Once, and not for every rank: what validates is read here and kept, and a tokenizer is trained if none is
    # named. A dataset that cannot be read shows itself here too, before training starts.
    cache.build(_folder(config), lambda folder: _make(config, folder, report), report=report, is_whole=is_whole)


def tokenizer(config: HuggingFace) -> Tokenizer:
    if config.tokenizer is not None:
        return tokenizers.load(Path(config.tokenizer))
    return tokenizers.load(_folder(config) / str(_index(config).tokenizer))


def vocab_size(config: HuggingFace) -> int:
    return _index(config).vocab_size


def check(
    config: HuggingFace, *, seq_len: int, global_batch: int, ranks: int, vocab_size: int, validation_sequences: int
) -> None:
    hold_streams(config.streams, ranks)
    if config.path in LOCAL_BUILDERS:
        _local_files(config)
    expected = config.vocab_size if config.tokenizer is None else tokenizer(config).vocab_size
    hold_vocabulary(vocab_size, expected)
    if validation_sequences:
        if config.validation_split is None and not config.validation_fraction:
            hold_validation(None, "data.validation_fraction", config.validation_fraction)
        if not config.validation_documents:
            hold_validation(None, "data.validation_documents", config.validation_documents)


def open_train(
    config: HuggingFace,
    *,
    seed: int,
    seq_len: int,
    global_batch: int,
    rank: int,
    ranks: int,
    state: State | None = None,
) -> Stream:
    # The seed changes nothing here: the order is that of the dataset, so that a position is a place in it.
    hf_documents: Any = importlib.import_module("titanlab.data.corpus.hf_documents")
    streaming: Any = importlib.import_module("titanlab.data.streams.streaming")
    dataset, reader = hf_documents.open_dataset(config, config.split), tokenizer(config)
    stream: Stream = streaming.StreamingStream(
        lambda number, position: hf_documents.StreamDocuments(dataset, config, reader, number, position),
        streams=config.streams,
        fingerprint=fingerprint(config),
        seq_len=seq_len,
        global_batch=global_batch,
        rank=rank,
        ranks=ranks,
        state=state,
    )
    if config.prefetch:
        stream = streaming.ReadAhead(stream, config.prefetch)
    return stream


def open_validation(config: HuggingFace, **how: int) -> Rows:
    indexed: Any = importlib.import_module("titanlab.data.streams.indexed")
    rows: Rows = indexed.open_validation(
        _folder(config),
        _index(config),
        key="data.validation_documents",
        value=config.validation_documents,
        **how,
    )
    return rows


def _content(config: HuggingFace) -> str:
    """A hash of everything but the number of streams."""
    named = (
        ["trained", config.vocab_size]
        if config.tokenizer is None
        else tokenizers.load(Path(config.tokenizer)).fingerprint
    )
    if config.path in LOCAL_BUILDERS:
        where: list[object] = [config.path, fingerprints.of_files(_local_files(config))]
    elif os.path.isdir(config.path):
        where = ["folder", fingerprints.of_files(matching(config.path, "data.path")), config.data_files]
    else:
        where = [config.path, config.data_files]
    held_out = [config.validation_split, config.validation_fraction, config.validation_documents]
    return fingerprints.of_values(
        ORDER, where, config.name, config.revision, config.split, held_out, config.text_field, named
    )


def _local_files(config: HuggingFace) -> list[Path]:
    here = [each for each in config.data_files if "://" not in each]
    return [file for each in here for file in matching(each, "data.data_files")]


def _folder(config: HuggingFace) -> Path:
    return cache.root() / "tokens" / f"hf-{_content(config)}"


def _index(config: HuggingFace) -> Index:
    folder = _folder(config)
    if not folder.is_dir():
        raise ConfigError("data", config.path, f"{folder} is missing", "prepare the data first")
    return read_index(folder, "data")


def _make(config: HuggingFace, folder: Path, report: Report) -> None:
    hf_documents: Any = importlib.import_module("titanlab.data.corpus.hf_documents")
    writer: Any = importlib.import_module("titanlab.data.shards.writer")
    report(f"opening the dataset {config.path}")
    dataset = hf_documents.open_dataset(config, config.split)
    if dataset.num_shards < config.streams:
        files, readers = dataset.num_shards, -(-config.streams // dataset.num_shards)
        report(f"{config.path} has {files} files for {config.streams} streams: each is read up to {readers} times")
    texts = (text for text in hf_documents.documents(dataset, config) if not _is_held_out(config, text))
    first = next(texts, None)
    if first is None:
        raise ConfigError("data.path", config.path, f"has no text in {config.text_field}", "name another column")
    if config.tokenizer is None:
        file = folder / "tokenizer.model"
        train_tokenizer(_sample(chain([first], texts)), vocab_size=config.vocab_size, file=file, report=report)
    else:
        file = tokenizers.find(Path(config.tokenizer))
    texts.close()
    index = writer.write_documents(
        folder,
        _validation_documents(config, dataset),
        tokenizer=tokenizers.load(file),
        tokenizer_file=file,
        fingerprint=_content(config),
        report=report,
        held_out=lambda text: True,
    )
    if config.validation_documents:
        report(f"{index.tokens('validation'):,} tokens held out")


def _sample(texts: Iterator[str]) -> Iterator[str]:
    training: Any = importlib.import_module("titanlab.data.tokenizers.training")
    left = training.SAMPLE_CHARACTERS
    for text in texts:
        yield text
        if (left := left - len(text)) <= 0:
            return


def _validation_documents(config: HuggingFace, dataset: Any) -> Iterator[str]:
    hf_documents: Any = importlib.import_module("titanlab.data.corpus.hf_documents")
    if not config.validation_documents:
        return iter(())
    if config.validation_split is not None:
        dataset = hf_documents.open_dataset(config, config.validation_split, "data.validation_split")
        texts = hf_documents.documents(dataset, config)
    else:
        texts = (text for text in hf_documents.documents(dataset, config) if _is_held_out(config, text))
    return islice(texts, config.validation_documents)


def _is_held_out(config: HuggingFace, text: str) -> bool:
    return config.validation_split is None and is_held_out(text, config.validation_fraction)
