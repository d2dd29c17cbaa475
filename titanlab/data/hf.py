"""data=hf: any dataset that Hugging Face `datasets` streams, such as C4."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from titanlab.data import cache, tokenizers
from titanlab.data.contract import DataSource, Separators
from titanlab.data.corpus import is_held_out, matching
from titanlab.data.schema import LOCAL_BUILDERS, HuggingFace
from titanlab.data.shard_index import Index, is_whole, read_index
from titanlab.data.source import check_streams, check_validation, check_vocab_size
from titanlab.data.stream import Report, Rows, State, Stream
from titanlab.data.text import check_tokenizer, train_tokenizer
from titanlab.data.tokenizers import Tokenizer
from titanlab.errors import ConfigError

ORDER = 1
"""Increased when a code change gives other tokens of the same dataset, or another order of them."""


class HuggingFaceSource(DataSource):
    """A dataset that `datasets` streams."""

    def __init__(self, config: HuggingFace) -> None:
        self.config = config

    def fingerprint(self) -> str:
        return cache.hash_of_values(self._content, self.config.streams)

    def prepare(self, *, report: Report) -> None:
        # Reads and keeps the held-out documents, and trains a tokenizer if the config names none: once, not on every
        # rank. A dataset that cannot be read fails here, before training starts.
        cache.build(self._folder, lambda folder: self._make(folder, report), report=report, is_whole=is_whole)

    def tokenizer(self) -> Tokenizer:
        if self.config.tokenizer is not None:
            return tokenizers.load(Path(self.config.tokenizer))
        return tokenizers.load(self._folder / str(self._index.tokenizer))

    def vocab_size(self) -> int:
        return self._index.vocab_size

    def separators(self) -> Separators:
        return Separators(begin=self._index.bos_id, end=self._index.eos_id)

    def check(self, *, ranks: int, vocab_size: int, validation_sequences: int, **_: int) -> None:
        config = self.config
        check_streams(config.streams, ranks)
        if config.path in LOCAL_BUILDERS:
            _local_files(config)
        expected = config.vocab_size if config.tokenizer is None else self.tokenizer().vocab_size
        check_vocab_size(vocab_size, expected)
        if config.document_mask and config.tokenizer is not None:
            check_tokenizer(self.tokenizer())
        if validation_sequences:
            if config.validation_split is None and not config.validation_fraction:
                check_validation(None, "data.validation_fraction", config.validation_fraction)
            if not config.validation_documents:
                check_validation(None, "data.validation_documents", config.validation_documents)

    def open_train(self, *, seed: int, ranks: int, state: State | None, **how: int) -> Stream:
        # The seed is not used: the documents come in the dataset's order, so that a position is a place in it.
        from titanlab.data import hf_documents, streaming

        dataset, reader = hf_documents.open_dataset(self.config, self.config.split), self.tokenizer()
        stream: Stream = streaming.StreamingStream(
            lambda number, position: hf_documents.StreamDocuments(dataset, self.config, reader, number, position),
            streams=self.config.streams,
            fingerprint=self.fingerprint(),
            ranks=ranks,
            state=state,
            **how,
        )
        if self.config.prefetch:
            stream = streaming.ReadAhead(stream, self.config.prefetch)
        return stream

    def open_validation(self, **how: int) -> Rows:
        from titanlab.data import indexed

        documents = self.config.validation_documents
        return indexed.open_validation(
            self._folder, self._index, key="data.validation_documents", value=documents, **how
        )

    @cached_property
    def _content(self) -> str:
        """A hash of everything but the number of streams."""
        config = self.config
        tokenizer = (
            ["trained", config.vocab_size]
            if config.tokenizer is None
            else tokenizers.load(Path(config.tokenizer)).fingerprint
        )
        if config.path in LOCAL_BUILDERS:
            location: list[object] = [config.path, cache.hash_of_files(_local_files(config))]
        elif os.path.isdir(config.path):
            location = ["folder", cache.hash_of_files(matching(config.path, "data.path")), config.data_files]
        else:
            location = [config.path, config.data_files]
        held_out = [config.validation_split, config.validation_fraction, config.validation_documents]
        return cache.hash_of_values(
            ORDER, location, config.name, config.revision, config.split, held_out, config.text_field, tokenizer
        )

    @property
    def _folder(self) -> Path:
        return cache.root() / "tokens" / f"hf-{self._content}"

    @cached_property
    def _index(self) -> Index:
        folder = self._folder
        if not folder.is_dir():
            raise ConfigError("data", self.config.path, f"{folder} is missing", "prepare the data first")
        return read_index(folder, "data")

    def _make(self, folder: Path, report: Report) -> None:
        from titanlab.data import hf_documents, shard_writer

        config = self.config
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
        index = shard_writer.write_documents(
            folder,
            _validation_documents(config, dataset),
            tokenizer=tokenizers.load(file),
            tokenizer_file=file,
            fingerprint=self._content,
            report=report,
            held_out=lambda text: True,
        )
        if config.validation_documents:
            report(f"{index.tokens('validation'):,} tokens held out")


def _local_files(config: HuggingFace) -> list[Path]:
    patterns = [pattern for pattern in config.data_files if "://" not in pattern]
    return [file for pattern in patterns for file in matching(pattern, "data.data_files")]


def _sample(texts: Iterator[str]) -> Iterator[str]:
    from titanlab.data import new_tokenizer

    left = new_tokenizer.SAMPLE_CHARACTERS
    for text in texts:
        yield text
        if (left := left - len(text)) <= 0:
            return


def _validation_documents(config: HuggingFace, dataset: Any) -> Iterator[str]:
    from titanlab.data import hf_documents

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
