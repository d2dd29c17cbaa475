"""Documents of text, JSONL and parquet files, in a fixed order, and the choice of documents for validation."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import glob
import gzip
import hashlib
import importlib
import io
import lzma
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.system import LFS_POINTER, parse_json

_LINES = {".jsonl", ".ndjson", ".json"}
_PACKED = {".gz", ".bz2", ".xz", ".zst"}
_NAMES = {"lines": "JSON, one object a line", "parquet": "parquet", "text": "text, one document a file"}
# Formats whose columns `datasets` reads.
_TABLES = {".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
_ARCHIVES = {".tar", ".tgz", ".zip", ".7z"}
# Files that describe a dataset, beside its data.
_ABOUT = {"dataset_infos.json", "dataset_info.json", "state.json", "_success"}
_ABOUT_TEXTS = {"readme", "license", "licence"}
_MOST_ENDINGS = 6
_SAMPLED_FILES = 1000
# About this many files, and this many bytes of each, are checked before the run starts.
_CHECKED_FILES = 100
_CHECKED_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files and how to read them.

    Attributes:
        key: config key that named the files, for errors.
        strict: whether a file that is not UTF-8 is an error; otherwise it is skipped.
        left_out: files that a folder or a glob matches but that are not read: descriptions beside data.
    """

    files: tuple[Path, ...]
    text_field: str = "text"
    key: str = "data.files"
    field_key: str = "data.text_field"
    strict: bool = True
    left_out: tuple[Path, ...] = ()

    def in_words(self) -> str:
        """In words: how the files are read, by the endings of their names, and which files are left out."""
        counts: dict[str, Counter[str]] = {}
        for file in self.files:
            counts.setdefault(_kind(file), Counter())[_ending(file) or "without an ending"] += 1
        parts = []
        for kind, endings in sorted(counts.items()):
            said = [f"{number:,} {ending}" for ending, number in endings.most_common(_MOST_ENDINGS)]
            if others := sum(endings.values()) - sum(number for _, number in endings.most_common(_MOST_ENDINGS)):
                said.append(f"{others:,} others")
            parts.append(f"{', '.join(said)} as {_NAMES[kind]}")
        if self.left_out:
            names = sorted({file.name for file in self.left_out})
            parts.append(f"left out: {', '.join(names[:_MOST_ENDINGS])}{' …' if len(names) > _MOST_ENDINGS else ''}")
        return "; ".join(parts)

    def documents(self) -> Iterator[str]:
        """Every complete document that is not empty."""
        for file in self.files:
            yield from self._documents_of(file)

    def check(self) -> None:
        """Check that the beginnings of about 100 files can be read and have text; no file is read completely."""
        for file in self.files:
            if builder := _TABLES.get(_ending(file)):
                rule = "is a table, and not text"
                cure = f"try data=hf data.path={builder} with data.data_files, or write it as JSONL or parquet"
                raise ConfigError(self.key, file, rule, cure)
            if _ending(file) in _ARCHIVES:
                raise ConfigError(self.key, file, "is an archive, and not text", "unpack it, or leave it out")
        if not any(file.stat().st_size for file in self.files):
            raise ConfigError(self.key, self.files[0], "is empty", "give files with text")
        step = max(1, len(self.files) // _CHECKED_FILES)
        for file in self.files[::step]:
            if _kind(file) == "text":
                self._check_text(file)
            else:
                next(self._documents_of(file), None)

    def _check_text(self, file: Path) -> None:
        with self._reading(file):
            with self._opened(file) as stream:
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
        read = {"parquet": self._parquet, "lines": self._lines, "text": self._text}[_kind(file)]
        with self._reading(file):
            yield from filter(None, read(file))

    @contextlib.contextmanager
    def _reading(self, file: Path) -> Iterator[None]:
        try:
            yield
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            # The libraries raise an OSError without a number for a damaged file.
            if not isinstance(error, OSError) or error.errno is None:
                kind = file.suffix.lower() or "compressed"
                raise ConfigError(self.key, file, f"is not a whole {kind} file ({error})", "fetch it again") from error
            rule = f"cannot be read ({error.strerror or error})"
            raise ConfigError(self.key, file, rule, "check the file and its permissions") from error

    @contextlib.contextmanager
    def _opened(self, file: Path) -> Iterator[io.BufferedReader]:
        """The bytes of a file, unpacked as the ending of its name says."""
        packed = file.suffix.lower()
        if packed == ".zst":
            arrow: Any = importlib.import_module("pyarrow")
            # A file can have several frames, as the files of the Pile do.
            stream = io.BufferedReader(arrow.CompressedInputStream(str(file), "zstd"))
        else:
            open_: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(packed, open)
            stream = open_(file, "rb")
        with stream:
            if self.strict and (other := other_format(stream.peek(_SIGNATURE_BYTES))):
                rule, ending, cure = other
                raise ConfigError(self.key, file, rule, f"{cure}, or give it the ending {ending}" if ending else cure)
            yield stream

    def _text(self, file: Path) -> Iterator[str]:
        with self._opened(file) as stream:
            content = stream.read()
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError as error:
            if self.strict:
                raise self._not_utf8(f"{file}, byte {error.start}") from error

    def _lines(self, file: Path) -> Iterator[str]:
        with self._opened(file) as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                except UnicodeDecodeError as error:
                    raise self._not_utf8(f"{file}:{number}") from error
                except ValueError as error:
                    cure = "one JSON object a line is expected"
                    raise ConfigError(self.key, f"{file}:{number}", f"is not JSON ({error})", cure) from error
                yield self._field(row, f"{file}:{number}")

    def _field(self, row: Any, place: str) -> str:
        if not isinstance(row, dict):
            cure = f'write {{"{self.text_field}": "..."}} a line'
            raise ConfigError(self.key, place, "is JSON, but not an object", cure)
        if self.text_field not in row:
            known = ", ".join(map(str, islice(row, 8))) or "none"
            raise ConfigError(self.field_key, self.text_field, f"is not in {place}", f"its keys are: {known}")
        text = row[self.text_field]
        if text is None:
            return ""
        if not isinstance(text, str):
            kind = type(text).__name__
            raise ConfigError(self.field_key, self.text_field, f"is {kind}, not text, in {place}", "name another")
        return whole_characters(text)

    def _parquet(self, file: Path) -> Iterator[str]:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
        try:
            with parquet.ParquetFile(file) as table:
                names = table.schema_arrow.names
                if names.count(self.text_field) > 1:
                    rule = f"is the name of {names.count(self.text_field)} columns in {file}"
                    raise ConfigError(self.field_key, self.text_field, rule, "write the file again with other names")
                if self.text_field not in names:
                    rule = f"is not in {file}"
                    raise ConfigError(self.field_key, self.text_field, rule, f"its columns are: {', '.join(names[:8])}")
                kind = table.schema_arrow.field(self.text_field).type
                if arrow.types.is_dictionary(kind):
                    kind = kind.value_type
                if kind not in (arrow.string(), arrow.large_string(), arrow.string_view()):
                    rule = f"is {kind}, not text, in {file}"
                    raise ConfigError(self.field_key, self.text_field, rule, "name another")
                for batch in table.iter_batches(batch_size=1024, columns=[self.text_field]):
                    yield from (text or "" for text in batch.column(0).to_pylist())
        except (arrow.ArrowException, UnicodeDecodeError) as error:
            rule = f"is not a readable Parquet file ({str(error)[:80]})"
            raise ConfigError(self.key, file, rule, "write it again, or leave it out") from error

    def _not_utf8(self, place: str) -> ConfigError:
        return ConfigError(self.key, place, "is not UTF-8 text", "convert it with iconv -t UTF-8, or leave it out")


def corpus_of(patterns: str, text_field: str) -> Corpus:
    """The corpus of the files that match; from folders and globs, leaves out files that describe data beside them."""
    files = matching(patterns)
    named = {Path(pattern) for pattern in _patterns(patterns)}
    about = set()
    for file in files:
        name = file.name.lower()
        if file not in named and (name in _ABOUT or (name.partition(".")[0] in _ABOUT_TEXTS and _kind(file) == "text")):
            about.add(file)
    # If all files are plain text, a README is a document too.
    if not any(_kind(file) != "text" or _ending(file) in _TABLES for file in files if file not in about):
        about = set()
    read = tuple(file for file in files if file not in about)
    return Corpus(files=read, text_field=text_field, left_out=tuple(sorted(about)))


# Installed packages, folders that only some systems have, and tables of characters, which are useless as training text.
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
# These files contain paths of the machine that built this Python.
_BUILT = ("_sysconfigdata", "_sysconfig_vars")


def library_of_python(folder: Path | None = None) -> Corpus:
    """The source of the standard library of this Python, sorted by the paths in it."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    sources: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT and not name.startswith("config-"))
        sources += [Path(place, file) for file in names if file.endswith(".py") and not file.startswith(_BUILT)]
    if not sources:
        rule = f"this Python came without the source of its library ({folder})"
        raise ConfigError("data", "stdlib", rule, "try data=files")
    files = tuple(sorted(sources, key=lambda file: file.relative_to(folder).parts))
    return Corpus(files=files, key="data", strict=False)


def matching(patterns: str, key: str = "data.files") -> tuple[Path, ...]:
    """The files that match a path, folder or glob, sorted; several patterns are separated by `:`.

    Raises:
        ConfigError: a pattern matches no file.
    """
    matches: set[Path] = set()
    for pattern in _patterns(patterns):
        if os.path.isfile(pattern):
            paths: Iterable[str] = [pattern]
        elif os.path.isdir(pattern):
            # The visible files of a folder and of its visible subfolders.
            paths = (path for each in _folders(pattern) for path in glob.iglob(os.path.join(glob.escape(each), "*")))
        else:
            paths = _matches(pattern)
        files = {Path(path) for path in paths if os.path.isfile(path)}
        if not files:
            rule = "has no files" if os.path.isdir(pattern) else "matches no file"
            raise ConfigError(key, pattern, rule, "check the path, and quote a pattern, so that no shell expands it")
        matches |= files
    if not matches:
        raise ConfigError(key, patterns, "names no file", "give a file, a folder or a glob")
    return tuple(sorted(matches))


def _matches(pattern: str) -> Iterator[str]:
    """As `glob.iglob`, which would not end if a link in a folder leads to a folder above it."""
    head, several, tail = f"{pattern}{os.sep}".partition(f"{os.sep}**{os.sep}")
    if not several:
        yield from glob.iglob(pattern)
        return
    while tail.startswith(f"**{os.sep}"):
        tail = tail[3:]
    for top in glob.iglob(head or os.sep):
        for folder in _folders(top):
            yield from _matches(os.path.join(glob.escape(folder), tail.rstrip(os.sep) or "*"))


def _folders(folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """A folder and the visible folders below it; does not follow links to folders above."""
    here = os.path.realpath(folder)
    if here in above or not os.path.isdir(folder):
        return
    yield folder
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                yield from _folders(entry.path, (*above, here))


def _patterns(patterns: str) -> list[str]:
    parts = filter(None, (part.strip() for part in patterns.split(os.pathsep)))
    return [os.path.abspath(os.path.expanduser(part)) for part in parts]


def _kind(file: Path) -> str:
    """The format of a file by the ending of its name: `parquet`, `lines` or `text`."""
    ending = _ending(file)
    return "parquet" if ending == ".parquet" else "lines" if ending in _LINES else "text"


def _ending(file: Path) -> str:
    """The ending of a file's name, without that of its compression, in small letters."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    return "".join((suffixes[:-1] if suffixes[-1:] and suffixes[-1] in _PACKED else suffixes)[-1:])


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


_SIGNATURE_BYTES = 64
_PACKED_SIGNATURES = (
    (b"\x1f\x8b", "gzip", ".gz"),
    (b"BZh", "bzip2", ".bz2"),
    (b"\xfd7zXZ\x00", "xz", ".xz"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
)


def other_format(content: bytes) -> tuple[str, str, str] | None:
    """The format that begins like this, the ending with which a corpus reads it, and a cure; None: perhaps text."""
    for signature, name, ending in _PACKED_SIGNATURES:
        # Text can begin with "BZh"; the magic number of a block follows in bzip2.
        if content.startswith(signature) and (name != "bzip2" or content[4:7] in (b"1AY", b"\x17rE")):
            return f"is compressed with {name}", ending, "decompress it"
    if content.startswith(LFS_POINTER):
        return "is a pointer of Git LFS, and not the file", "", "run `git lfs pull` in its repository"
    if content.startswith(b"PK\x03\x04"):
        return "is a zip archive, and not text", "", "unpack it"
    if content.startswith(b"PAR1"):
        return "is parquet", "", "give it the ending .parquet"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "begins as UTF-16 text does", "", "convert it with iconv -f UTF-16 -t UTF-8"
    return None


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to validation.

    Args:
        fraction: part of all documents to hold out, in [0, 1); 0 holds out none.
    """
    if fraction <= 0:
        return False
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64
