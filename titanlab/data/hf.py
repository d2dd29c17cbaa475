"""data=hf: reads any dataset that Hugging Face `datasets` streams, such as C4, as documents of virtual streams."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import sys
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.data import cache, tokenizers
from titanlab.data.contract import Report, Stream, as_saved
from titanlab.data.corpus import is_held_out, matching, whole_characters
from titanlab.data.schema import LOCAL_BUILDERS, HuggingFace
from titanlab.data.source import check_multiple, check_validation
from titanlab.data.text import CachedText, train_tokenizer
from titanlab.data.tokenizers import Tokenizer, separators_of
from titanlab.errors import ConfigError
from titanlab.system import check_reachable, is_offline

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from titanlab.data.streaming import Position

ORDER = 1
"""Increased when a code change gives other tokens for the same dataset, or another order of tokens."""


class HuggingFaceSource(CachedText[HuggingFace]):
    """A dataset that `datasets` streams."""

    def fingerprint(self) -> str:
        return cache.hash_of_values(self._content, self.config.streams)

    @property
    def held_out(self) -> tuple[str, object]:
        return "data.validation_documents", self.config.validation_documents

    def check(self, *, ranks: int, vocab_size: int, validation_sequences: int, **_: int) -> None:
        config = self.config
        check_multiple("data.streams", config.streams, ranks)
        if config.path in LOCAL_BUILDERS:
            _local_files(config)
        self.check_tokens(vocab_size)
        if validation_sequences and config.validation_split is None and not config.validation_fraction:
            check_validation(None, "data.validation_fraction", config.validation_fraction)
        if validation_sequences and not config.validation_documents:
            check_validation(None, *self.held_out)

    def open_train(self, *, seed: int, seq_len: int, **place: Any) -> Stream:
        from titanlab.data import streaming

        # Do not use the seed: documents come in the dataset's order, so that a position is a place in the dataset.
        dataset, reader = open_dataset(self.config, self.config.split), self.tokenizer()
        stream: Stream = streaming.StreamingStream(
            lambda number, position: StreamDocuments(dataset, self.config, reader, number, position),
            streams=self.config.streams,
            fingerprint=self.fingerprint(),
            seq_len=seq_len,
            **place,
        )
        if self.config.prefetch:
            stream = streaming.ReadAhead(stream, self.config.prefetch)
        return stream

    @cached_property
    def _content(self) -> str:
        """A hash of all that decides the documents and their tokens, except the number of streams."""
        config, tokenizer = self.config, self.tokenizer_identity()
        if config.path in LOCAL_BUILDERS:
            location: list[object] = [config.path, cache.hash_of_files(_local_files(config))]
        elif os.path.isdir(config.path):
            location = ["folder", cache.hash_of_files(matching(config.path, "data.path")), list(config.data_files)]
        else:
            location = [config.path, list(config.data_files)]
        held_out = [config.validation_split, config.validation_fraction, config.validation_documents]
        return cache.hash_of_values(
            ORDER, location, config.name, config.revision, config.split, held_out, config.text_field, tokenizer
        )

    @cached_property
    def folder(self) -> Path:
        return cache.root() / "tokens" / f"hf-{self._content}"

    def make(self, folder: Path, report: Report) -> None:
        # Do once what need not be done on every rank: read and keep the held-out documents; train a tokenizer if the
        # config names none. A dataset that cannot be read fails here, before training starts.
        from titanlab.data import shards
        from titanlab.data.new_tokenizer import beginning

        config = self.config
        report(f"opening the dataset {config.path}")
        dataset = open_dataset(config, config.split)
        if dataset.num_shards < config.streams:
            files, readers = dataset.num_shards, -(-config.streams // dataset.num_shards)
            report(f"{config.path} has {files} files for {config.streams} streams: each is read up to {readers} times")
        texts = (text for text in documents(dataset, config) if not _is_held_out(config, text))
        first = next(texts, None)
        if first is None:
            raise ConfigError("data.path", config.path, f"has no text in {config.text_field}", "name another column")
        if config.tokenizer is None:
            reader = train_tokenizer(beginning(chain([first], texts)), config, folder, report)
        else:
            reader = tokenizers.load(Path(config.tokenizer))
        texts.close()
        if config.validation_split is not None and config.validation_documents:
            dataset = open_dataset(config, config.validation_split, "data.validation_split")
            held_out = documents(dataset, config)
        else:
            held_out = (text for text in documents(dataset, config) if _is_held_out(config, text))
        index = shards.write_documents(
            folder,
            islice(held_out, config.validation_documents),
            tokenizer=reader,
            fingerprint=self._content,
            report=report,
            held_out=lambda text: True,
        )
        if config.validation_documents:
            report(f"{index.tokens('validation'):,} tokens held out")


def _local_files(config: HuggingFace) -> list[Path]:
    patterns = [pattern for pattern in config.data_files if "://" not in pattern]
    return [file for pattern in patterns for file in matching(pattern, "data.data_files")]


def _is_held_out(config: HuggingFace, text: str) -> bool:
    return config.validation_split is None and is_held_out(text, config.validation_fraction)


class StreamDocuments:
    """The training documents of virtual stream v of V, epoch after epoch.

    If there are at least as many files (shards) as streams, stream v reads the files v, v + V, …. If there are fewer
    files, the streams that share a file take its documents in turn.

    Args:
        dataset: an HF `IterableDataset`, not shuffled.
        position: where to continue, as the method `position` returns it; None: start at the beginning.
    """

    def __init__(
        self, dataset: Any, config: HuggingFace, tokenizer: Tokenizer, number: int, position: Position | None
    ) -> None:
        self._dataset, self._config, self._tokenizer, self._number = dataset, config, tokenizer, number
        self._files = min(dataset.num_shards, config.streams)
        self._sharing = len(range(number % self._files, config.streams, self._files))
        self._turn = number // self._files
        self._epoch = self._seen = self._kept = 0
        state = None
        if position is not None:
            place = f"parts.{number}.position"
            counts = (as_saved(f"{place}.{name}", position.get(name), int) for name in ("epoch", "seen", "kept"))
            self._epoch, self._seen, self._kept = counts
            # If the key is missing, pass a string, which the check refuses: null is valid and means the beginning.
            state = as_saved(f"{place}.dataset", position.get("dataset", ""), dict | None)
        self._open(state)

    def position(self) -> Position:
        """The epoch, the numbers of documents seen and kept in this epoch, and the state of the HF dataset."""
        state = self._part.state_dict() if self._begun else self._start
        return {"epoch": self._epoch, "seen": self._seen, "kept": self._kept, "dataset": state}

    def next(self) -> npt.NDArray[np.uint32]:
        """The next document, uint32 `[tokens]`."""
        # Imported here: the checks of a recipe need no numpy.
        import numpy as np

        while True:
            row = _next(self._rows, self._config)
            if row is None:
                if not self._kept:
                    rule = f"stream {self._number} has no document: the dataset is too small for so many"
                    cure = f"try data.streams={max(1, self._files // 2)}"
                    raise ConfigError("data.streams", self._config.streams, rule, cure)
                self._epoch, self._seen, self._kept = self._epoch + 1, 0, 0
                self._open(None)
                continue
            self._begun = True
            self._seen += 1
            text = text_of(row, self._config) if (self._seen - 1) % self._sharing == self._turn else ""
            if text and not _is_held_out(self._config, text):
                self._kept += 1
                return np.array(separators_of(self._tokenizer).around(self._tokenizer.encode(text)), dtype=np.uint32)

    def close(self) -> None:
        self._source.close()

    def _open(self, state: dict[str, Any] | None) -> None:
        """Begin to read this stream's files, from a state of the HF dataset; None: from the beginning."""
        # Keep the state: after `load_state_dict`, an HF dataset's `state_dict` is another one until a row is read.
        self._start, self._begun = state, False
        self._part = self._dataset.shard(num_shards=self._files, index=self._number % self._files, contiguous=False)
        if state is not None:
            self._part.load_state_dict(copy.deepcopy(state))
        self._source = _rows(self._part)
        self._rows: Iterator[dict[str, Any]] = self._source
        if state is None:
            return
        try:
            # Read a row here, because `datasets` reads the state only with the first row.
            first = _next(self._source, self._config)
        except ConfigError as error:
            # Errors of other types may come from the files. Do not call the checkpoint damaged: if another version of
            # `datasets` saved it, all earlier checkpoints fail too.
            if not isinstance(error.__cause__, (TypeError, LookupError, AttributeError, OverflowError)):
                raise
            rule = f"datasets does not understand it ({type(error.__cause__).__name__})"
            cure = "install the version of datasets that saved it, or resume from another checkpoint of the run"
            raise ConfigError(f"data.parts.{self._number}.position.dataset", state, rule, cure) from error
        if first is not None:
            self._rows = chain([first], self._source)


def documents(dataset: Any, config: HuggingFace) -> Iterator[str]:
    """The texts of a dataset in its order, without empty ones."""
    rows = _rows(dataset)
    with contextlib.closing(rows):
        while (row := _next(rows, config)) is not None:
            if text := text_of(row, config):
                yield text


def text_of(row: dict[str, Any], config: HuggingFace) -> str:
    """The text of a row; empty if the row's value is null."""
    if config.text_field not in row:
        rule = f"is not a column of {config.path}"
        raise ConfigError("data.text_field", config.text_field, rule, f"it has: {', '.join(row)[:80]}")
    text = row[config.text_field]
    if text is not None and not isinstance(text, str):
        rule = f"holds {type(text).__name__}, not text"
        raise ConfigError("data.text_field", config.text_field, rule, "name another column")
    return whole_characters(text or "")


def open_dataset(config: HuggingFace, split: str, key: str = "data.split") -> Any:
    """Open an HF `IterableDataset`; reads only the dataset's description."""
    if config.path not in LOCAL_BUILDERS and not os.path.exists(config.path) and not is_offline():
        check_reachable(config.path, "data.path")
    options = {"name": config.name, "revision": config.revision, "data_files": list(config.data_files) or None}
    try:
        dataset = _library().load_dataset(config.path, split=split, streaming=True, **options)
        return _text_only(dataset, config, split, options)
    # `datasets` and its dependencies raise dozens of types, which share no base class but Exception.
    except Exception as error:
        raise _explained(error, config, split, key) from error


def _text_only(dataset: Any, config: HuggingFace, split: str, options: dict[str, Any]) -> Any:
    """The dataset with the column of the text only, if `datasets` can leave out the others.

    `datasets` gives all files the types of the first file, and refuses a file in which any column has another type.
    """
    name, library = config.text_field, _library()
    kind = (dataset.features or {}).get(name)
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        return dataset
    if config.path == "parquet":
        return library.load_dataset(config.path, split=split, streaming=True, columns=[name], **options)
    if config.path != "json":
        return dataset
    builder = library.load_dataset_builder(config.path, features=library.Features({name: kind}), **options)
    cast = builder._cast_table  # datasets 5.2 has no option that selects columns
    builder._cast_table = lambda table, **more: cast(
        table.select([column for column in table.column_names if column == name]), **more
    )
    return builder.as_streaming_dataset(split=split)


def _explained(error: Exception, config: HuggingFace, split: str, key: str) -> ConfigError:
    kinds, message = {base.__name__ for base in type(error).__mro__}, _in_short(error)
    if "split" in message.lower() and "ValueError" in kinds:
        return ConfigError(key, split, f"is not a split of {config.path} ({message})", "name one that it has")
    if "BuilderConfig" in message or "Config name is missing" in message:
        return ConfigError("data.name", config.name, f"does not fit {config.path} ({message})", "name another")
    if kinds & {"DatasetNotFoundError", "FileNotFoundError", "DataFilesNotFoundError", "EmptyDatasetError"}:
        rule = f"was not found ({message})"
        return ConfigError("data.path", config.path, rule, "check the name; a gated dataset needs HF_TOKEN")
    if kinds & {"ConnectionError", "OSError", "OfflineModeIsEnabled", "HTTPError", "TimeoutException"}:
        rule = f"cannot be reached ({message})"
        return ConfigError("data.path", config.path, rule, "check the network, or try data=stdlib")
    return ConfigError("data.path", config.path, f"cannot be opened ({message})", "check path, name and data_files")


def _next(rows: Iterator[dict[str, Any]], config: HuggingFace) -> dict[str, Any] | None:
    try:
        return next(rows, None)
    except OSError:
        # The network or the disk failed, not the data: the caller decides whether to try again.
        raise
    except Exception as error:
        rule = f"has a part that cannot be read ({_in_short(error)})"
        raise ConfigError("data.path", config.path, rule, "check its files") from error


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _rows(dataset: Any) -> Any:
    # Make a generator, so that the caller can close it: a plain iterator has no `close`.
    yield from dataset


def _library() -> Any:
    before = os.environ.get("USE_TORCH")
    if not {"datasets", "torch"} & sys.modules.keys():
        # `datasets` would import torch, which takes 1.5 s and is not used here.
        os.environ["USE_TORCH"] = "0"
    try:
        return importlib.import_module("datasets")
    finally:
        if before is None:
            os.environ.pop("USE_TORCH", None)
        else:
            os.environ["USE_TORCH"] = before
