"""Reads the documents of text, JSONL and parquet files in a fixed order, and chooses those for validation."""

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
import re
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
# Endings of tables → the builder of `datasets` that reads their columns; a corpus refuses such files.
_TABLES = {".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
_ARCHIVES = {".tar", ".tgz", ".zip", ".7z"}
# Names of files that describe a dataset and lie beside its data.
_ABOUT = {"dataset_infos.json", "dataset_info.json", "state.json", "_success"}
_ABOUT_TEXTS = {"readme", "license", "licence"}
_MOST_ENDINGS = 6
_SAMPLED_FILES = 1000
# Before the run starts, about _CHECKED_FILES files are checked, and of each text file _CHECKED_BYTES bytes.
_CHECKED_FILES = 100
_CHECKED_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files and how to read them.

    Attributes:
        key: the config key that names the files, for errors.
        strict: whether a file that is not UTF-8 is an error; otherwise such a file is skipped.
        left_out: files that a folder or glob matches but that are not read, because they only describe the data.
    """

    files: tuple[Path, ...]
    text_field: str = "text"
    key: str = "data.files"
    field_key: str = "data.text_field"
    strict: bool = True
    left_out: tuple[Path, ...] = ()

    def in_words(self) -> str:
        """Say in words how the files are read, by the endings of their names, and which files are left out."""
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
        """All documents of all files, except empty ones."""
        for file in self.files:
            yield from self._documents_of(file)

    def check(self) -> None:
        """Check that the beginnings of about 100 files can be read and have text; no file is read completely."""
        for file in self.files:
            if builder := _TABLES.get(_ending(file)):
                cure = f"try data=hf data.path={builder} with data.data_files, or write it as JSONL or parquet"
                raise ConfigError(self.key, file, "is a table, and not text", cure)
            if _ending(file) in _ARCHIVES:
                raise ConfigError(self.key, file, "is an archive, and not text", "unpack it, or leave it out")
        if not any(file.stat().st_size for file in self.files):
            raise ConfigError(self.key, self.files[0], "is empty", "give files with text")
        for file in self.files[:: max(1, len(self.files) // _CHECKED_FILES)]:
            next(self._documents_of(file, most=_CHECKED_BYTES), None)

    def sample(self, characters: int) -> Iterator[str]:
        """Texts of about `characters` characters in total, from files all over the corpus; reads little more."""
        chosen = self.files[:: max(1, len(self.files) // _SAMPLED_FILES)]
        share = _share(sorted(path.stat().st_size for path in chosen), characters)
        for file in chosen:
            budget = share
            for text in self._documents_of(file):
                yield text[:budget]
                if (budget := budget - len(text)) <= 0:
                    break

    def _documents_of(self, file: Path, *, most: int = -1) -> Iterator[str]:
        """The documents of a file; of a text file only the first `most` bytes, unless `most` is negative."""
        try:
            yield from filter(None, self._texts(file, most))
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            # An OSError without an error number comes from a decompression library: the file is damaged.
            if not isinstance(error, OSError) or error.errno is None:
                kind = file.suffix.lower() or "compressed"
                raise ConfigError(self.key, file, f"is not a whole {kind} file ({error})", "fetch it again") from error
            rule = f"cannot be read ({error.strerror or error})"
            raise ConfigError(self.key, file, rule, "check the file and its permissions") from error

    def _texts(self, file: Path, most: int) -> Iterator[str]:
        if (kind := _kind(file)) == "parquet":
            yield from self._parquet(file)
            return
        with _opened(file) as stream:
            if self.strict and (other := other_format(stream.peek(_SIGNATURE_BYTES))):
                rule, ending, cure = other
                raise ConfigError(self.key, file, rule, f"{cure}, or give it the ending {ending}" if ending else cure)
            place = str(file)
            try:
                if kind == "text":
                    content = stream.read(most)
                    # If `most` bytes were read, the last byte may be inside a character.
                    yield codecs.getincrementaldecoder("utf-8")().decode(content, final=len(content) != most)
                    return
                for number, line in enumerate(stream, 1):
                    place = f"{file}:{number}"
                    if line.strip():
                        yield self._field(parse_json(line), place)
            except UnicodeDecodeError as error:
                if self.strict:
                    place += f", byte {error.start}" * (kind == "text")
                    cure = "convert it with iconv -t UTF-8, or leave it out"
                    raise ConfigError(self.key, place, "is not UTF-8 text", cure) from error
            except ValueError as error:
                cure = "one JSON object a line is expected"
                raise ConfigError(self.key, place, f"is not JSON ({error})", cure) from error

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
        name = self.text_field
        try:
            with parquet.ParquetFile(file) as table:
                names = table.schema_arrow.names
                if (count := names.count(name)) > 1:
                    rule, cure = f"is the name of {count} columns in {file}", "write the file again with other names"
                    raise ConfigError(self.field_key, name, rule, cure)
                if not count:
                    cure = f"its columns are: {', '.join(names[:8])}"
                    raise ConfigError(self.field_key, name, f"is not in {file}", cure)
                kind = table.schema_arrow.field(name).type
                if arrow.types.is_dictionary(kind):
                    kind = kind.value_type
                if kind not in (arrow.string(), arrow.large_string(), arrow.string_view()):
                    raise ConfigError(self.field_key, name, f"is {kind}, not text, in {file}", "name another")
                for batch in table.iter_batches(batch_size=1024, columns=[name]):
                    yield from (text or "" for text in batch.column(0).to_pylist())
        except (arrow.ArrowException, UnicodeDecodeError) as error:
            rule = f"is not a readable Parquet file ({str(error)[:80]})"
            raise ConfigError(self.key, file, rule, "write it again, or leave it out") from error


def _opened(file: Path) -> io.BufferedReader:
    """Open a file for its bytes; decompress them if the ending of the name says so."""
    if (packed := file.suffix.lower()) == ".zst":
        arrow: Any = importlib.import_module("pyarrow")
        # Arrow's stream reads a file of several zstd frames to the end; files of the Pile have several frames.
        return io.BufferedReader(arrow.CompressedInputStream(str(file), "zstd"))
    open_: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(packed, open)
    stream: io.BufferedReader = open_(file, "rb")
    return stream


def corpus_of(patterns: str, text_field: str) -> Corpus:
    """The corpus of the files that match `patterns`, without files of folders and globs that only describe data."""
    files = matching(patterns)
    named = {Path(pattern) for pattern in _patterns(patterns)}
    about = tuple(file for file in files if file not in named and _is_about(file))
    # If all files are plain text, leave nothing out: a README is then a document too.
    if not any(_kind(file) != "text" or _ending(file) in _TABLES for file in files if file not in about):
        about = ()
    read = tuple(file for file in files if file not in about)
    return Corpus(files=read, text_field=text_field, left_out=about)


def _is_about(file: Path) -> bool:
    name = file.name.lower()
    return name in _ABOUT or (name.partition(".")[0] in _ABOUT_TEXTS and _kind(file) == "text")


# Folders that are not read: installed packages, tests, modules that only some systems have, tables of characters.
_LEFT_OUT = {
    *("__pycache__", "__phello__", "dist-packages", "encodings", "ensurepip", "idlelib"),
    *("lib-dynload", "lib2to3", "site-packages", "test", "tests", "turtledemo"),
}
# Files whose names begin with one of these are not read: they have paths of the machine that built this Python.
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
            # Take the visible files of the folder and of its visible subfolders.
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
    """Like `glob.iglob`, but without endless repetition if a link in a folder leads to a folder above it."""
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
    """The ending of a file's name in lower case; the ending of a compression, such as `.gz`, is left out."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    return "".join((suffixes[:-1] if suffixes[-1:] and suffixes[-1] in _PACKED else suffixes)[-1:])


def _share(sizes: list[int], characters: int) -> int:
    """The most characters to read of each file, so that all files together give `characters`; `sizes` is sorted."""
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
# For formats other than plain text: the first bytes, what is wrong, the ending with which a corpus reads it, the cure.
_SIGNATURES = (
    (rb"\x1f\x8b", ("is compressed with gzip", ".gz", "decompress it")),
    # Text can begin with "BZh" too, so match also the magic number that follows in a bzip2 file.
    (rb"BZh.(1AY|\x17rE)", ("is compressed with bzip2", ".bz2", "decompress it")),
    (rb"\xfd7zXZ\x00", ("is compressed with xz", ".xz", "decompress it")),
    (rb"\x28\xb5\x2f\xfd", ("is compressed with zstd", ".zst", "decompress it")),
    (re.escape(LFS_POINTER), ("is a pointer of Git LFS, and not the file", "", "run `git lfs pull` in its repository")),
    (rb"PK\x03\x04", ("is a zip archive, and not text", "", "unpack it")),
    (rb"PAR1", ("is parquet", "", "give it the ending .parquet")),
    (rb"\xff\xfe|\xfe\xff", ("begins as UTF-16 text does", "", "convert it with iconv -f UTF-16 -t UTF-8")),
)


def other_format(content: bytes) -> tuple[str, str, str] | None:
    """What is wrong with a file that begins like this, the ending for its format, a cure; None: it may be text."""
    return next((other for first, other in _SIGNATURES if re.match(first, content, re.DOTALL)), None)


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to validation; only a hash of its text decides.

    Args:
        fraction: the share of all documents to hold out, in [0, 1); 0: hold out none.
    """
    if fraction <= 0:
        return False
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64
