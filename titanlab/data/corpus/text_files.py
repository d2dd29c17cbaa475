"""Documents of text, JSONL and parquet files, in a fixed order."""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import importlib
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError

_LINES = {".jsonl", ".ndjson", ".json"}
_SAMPLED_FILES = 1000
# About so many files, and so many bytes of each, are checked before anything starts.
_CHECKED_FILES = 100
_CHECKED_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files and how to read them.

    Attributes:
        files: in the order of their documents.
        text_field: key or column of the text in JSONL and parquet.
        key: config key that named the files, for errors.
        field_key: config key that named the field.
        strict: whether a file that is not UTF-8 is an error; otherwise it is skipped.
    """

    files: tuple[Path, ...]
    text_field: str = "text"
    key: str = "data.files"
    field_key: str = "data.text_field"
    strict: bool = True

    def documents(self) -> Iterator[str]:
        """Every complete document that is not empty.

        Raises:
            ConfigError: a file cannot be read, or does not have the format of its file name's ending.
        """
        for file in self.files:
            yield from self._documents_of(file)

    def check(self) -> None:
        """Check that the beginnings of about 100 files can be read and have text; no file is read completely.

        Raises:
            ConfigError: a file cannot be read or does not have the format of its ending, or all files are empty.
        """
        if not any(file.stat().st_size for file in self.files):
            raise ConfigError(self.key, self.files[0], "is empty", "give files with text in them")
        step = max(1, len(self.files) // _CHECKED_FILES)
        for file in self.files[::step]:
            if self._kind(file)[0] == "text":
                self._check_text(file)
            else:
                next(self._documents_of(file), None)

    def _check_text(self, file: Path) -> None:
        with self._reading(file):
            with _opened(file, packed=self._kind(file)[1]) as stream:
                begin = stream.read(_CHECKED_BYTES)
            try:
                # The end of the bytes may be inside a character.
                codecs.getincrementaldecoder("utf-8")().decode(begin, final=len(begin) < _CHECKED_BYTES)
            except UnicodeDecodeError as error:
                if self.strict:
                    raise self._not_utf8(f"{file}, byte {error.start}") from error

    def sample(self, characters: int) -> Iterator[str]:
        """Texts of about `characters` characters in total, spread over the files; reads little more than it yields."""
        step = max(1, len(self.files) // _SAMPLED_FILES)
        chosen = self.files[::step]
        share = _share(sorted(path.stat().st_size for path in chosen), characters)
        for file in chosen:
            budget = share
            for text in self._documents_of(file):
                yield text[:budget]
                if (budget := budget - len(text)) <= 0:
                    break

    def _documents_of(self, file: Path) -> Iterator[str]:
        kind, packed = self._kind(file)
        with self._reading(file):
            if kind == "parquet":
                texts = self._parquet(file)
            elif kind == "lines":
                texts = self._lines(file, packed=packed)
            else:
                texts = self._text(file, packed=packed)
            for text in texts:
                if text:
                    yield text

    @staticmethod
    def _kind(file: Path) -> tuple[str, bool]:
        """The format of a file by its name's ending (`parquet`, `lines` or `text`), and whether it is gzipped."""
        suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
        packed = suffixes[-1:] == [".gz"]
        ending = "".join((suffixes[:-1] if packed else suffixes)[-1:])
        return "parquet" if ending == ".parquet" else "lines" if ending in _LINES else "text", packed

    @contextlib.contextmanager
    def _reading(self, file: Path) -> Iterator[None]:
        """Turn errors while a file is read into `ConfigError`."""
        try:
            yield
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(self.key, file, f"is no whole gzip file ({error})", "fetch it again") from error
        except OSError as error:
            raise ConfigError(
                self.key, file, f"cannot be read ({error.strerror or error})", "check the file and its permissions"
            ) from error

    def _text(self, file: Path, *, packed: bool) -> Iterator[str]:
        with _opened(file, packed=packed) as stream:
            content = stream.read()
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError as error:
            if self.strict:
                raise self._not_utf8(f"{file}, byte {error.start}") from error

    def _lines(self, file: Path, *, packed: bool) -> Iterator[str]:
        with _opened(file, packed=packed) as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except UnicodeDecodeError as error:
                    raise self._not_utf8(f"{file}:{number}") from error
                except (ValueError, RecursionError) as error:
                    raise ConfigError(
                        self.key, f"{file}:{number}", f"is not JSON ({error})", "one JSON object a line is expected"
                    ) from error
                yield self._field(row, f"{file}:{number}")

    def _field(self, row: Any, place: str) -> str:
        if not isinstance(row, dict):
            raise ConfigError(self.key, place, "is JSON, but no object", f'write {{"{self.text_field}": "..."}} a line')
        if self.text_field not in row:
            known = ", ".join(map(str, islice(row, 8))) or "none"
            raise ConfigError(self.field_key, self.text_field, f"is not in {place}", f"its keys are: {known}")
        text = row[self.text_field]
        if text is None:
            return ""
        if not isinstance(text, str):
            kind = type(text).__name__
            raise ConfigError(self.field_key, self.text_field, f"is {kind}, no text, in {place}", "name another")
        return whole_characters(text)

    def _parquet(self, file: Path) -> Iterator[str]:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
        try:
            with parquet.ParquetFile(file) as table:
                names = table.schema_arrow.names
                if self.text_field not in names:
                    raise ConfigError(
                        self.field_key, self.text_field, f"is not in {file}", f"its columns are: {', '.join(names[:8])}"
                    )
                kind = table.schema_arrow.field(self.text_field).type
                if arrow.types.is_dictionary(kind):
                    kind = kind.value_type
                if kind not in (arrow.string(), arrow.large_string(), arrow.string_view()):
                    raise ConfigError(self.field_key, self.text_field, f"is {kind}, no text, in {file}", "name another")
                for batch in table.iter_batches(batch_size=1024, columns=[self.text_field]):
                    yield from (text or "" for text in batch.column(0).to_pylist())
        except (arrow.ArrowException, UnicodeDecodeError) as error:
            raise ConfigError(
                self.key, file, f"is no readable parquet ({str(error)[:80]})", "write it again, or leave it out"
            ) from error

    def _not_utf8(self, place: str) -> ConfigError:
        return ConfigError(self.key, place, "is not UTF-8 text", "convert it with iconv -t UTF-8, or leave it out")


def matching(patterns: str, key: str = "data.files") -> tuple[Path, ...]:
    """The files that match a path, folder or glob, sorted; several patterns are separated by `:`.

    Raises:
        ConfigError: a pattern matches no file.
    """
    matches: set[Path] = set()
    for pattern in filter(None, (part.strip() for part in patterns.split(os.pathsep))):
        pattern = os.path.abspath(os.path.expanduser(pattern))
        if os.path.isfile(pattern):
            paths: Iterable[str] = [pattern]
        elif os.path.isdir(pattern):
            paths = glob.iglob(os.path.join(glob.escape(pattern), "**"), recursive=True)
        else:
            paths = glob.iglob(pattern, recursive=True)
        files = {Path(path) for path in paths if os.path.isfile(path)}
        if not files:
            rule = "has no files" if os.path.isdir(pattern) else "matches no file"
            raise ConfigError(key, pattern, rule, "check the path, and quote a pattern, so that no shell expands it")
        matches |= files
    if not matches:
        raise ConfigError(key, patterns, "names no file", "give a file, a folder or a glob")
    return tuple(sorted(matches))


def _share(sizes: list[int], characters: int) -> int:
    """The most to read of each file, so that all files together give `characters`; `sizes` is sorted."""
    for smaller_files, size in enumerate(sizes):
        share = characters // (len(sizes) - smaller_files) + 1
        if size >= share:
            return share
        characters -= size
    return max(sizes, default=0) + 1


def whole_characters(text: str) -> str:
    """Replace lone surrogates by `?`: JSON can contain them, UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _opened(file: Path, *, packed: bool) -> io.BufferedIOBase:
    return gzip.open(file, "rb") if packed else file.open("rb")
