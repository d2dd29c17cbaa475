"""The index of a folder of token shards: the content of its files, and the check that they are complete.

index.json               format, version, dtype, vocab_size, special tokens, fingerprint, files
train-00000.bin …        little-endian uint16 or uint32, document after document
validation-00000.bin …   the same, of held-out documents
tokenizer.model          or tokenizer.json; optional
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlab.data import cache
from titanlab.errors import ConfigError
from titanlab.system import parse_json

INDEX = "index.json"
FORMAT = "titanlab-tokens"
VERSION = 1
BYTES = {"uint16": 2, "uint32": 4}
"""Bytes of one token, by the index's dtype."""


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """One file of tokens; `documents` is the writer's count, 0 where it is not known."""

    file: str
    tokens: int
    documents: int = 0


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The content of `index.json`.

    Attributes:
        dtype: `uint16` or `uint32`.
        vocab_size: every token is below it.
        bos_id, eos_id: tokens around each document; None where the tokenizer has no such token.
        tokenizer: its file in the folder; None without a tokenizer.
        fingerprint: hash of the tokens; None: computed from the files.
    """

    dtype: str
    vocab_size: int
    bos_id: int | None = None
    eos_id: int | None = None
    tokenizer: str | None = None
    fingerprint: str | None = None
    train: tuple[TokenShard, ...] = ()
    validation: tuple[TokenShard, ...] = ()

    @property
    def files(self) -> list[str]:
        """Names of all files, those of `train` first."""
        return [shard.file for shard in (*self.train, *self.validation)]

    def tokens(self, split: str) -> int:
        """Tokens of `train` or `validation`."""
        return sum(shard.tokens for shard in self.split(split))

    def split(self, name: str) -> tuple[TokenShard, ...]:
        """Files of `train` or `validation`."""
        return self.train if name == "train" else self.validation

    def sequences(self, split: str, seq_len: int) -> int:
        """Number of complete sequences; each needs one token more, the label of its last token."""
        return sum(max(0, shard.tokens - 1) // seq_len for shard in self.split(split))


def dtype_for(vocab_size: int) -> str:
    """The smallest dtype that can store every token."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_index(folder: Path, key: str = "data.folder") -> ShardIndex:
    """Read and check a folder's index, and check that its files have the lengths in it.

    Raises:
        ConfigError: the index is missing or not valid, or a file is missing or has another length.
    """
    path = folder / INDEX
    cure = "make the folder with `titanlab tokenize`"
    if not folder.is_dir():
        raise ConfigError(key, folder, "is no folder", cure)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(key, folder, f"has no {INDEX}", cure) from None
    except (OSError, ValueError) as error:
        raise ConfigError(key, path, f"cannot be read ({error})", cure) from error
    # Imported here: only a folder of token shards needs it.
    import msgspec

    try:
        found = msgspec.convert(content, dict[str, Any])
        if found.get("format") != FORMAT or found.get("version") != VERSION:
            is_other = f"format {found.get('format')!r} version {found.get('version')!r}"
            raise ValueError(f"{is_other}, not {FORMAT!r} {VERSION}")
        index = msgspec.convert(content, ShardIndex)
        if index.dtype not in BYTES:
            raise ValueError(f"dtype {index.dtype!r}, neither uint16 nor uint32")
        if not 0 < index.vocab_size <= 1 << 8 * BYTES[index.dtype]:
            raise ValueError(f"vocab_size {index.vocab_size} does not fit {index.dtype}")
        if outside := [name for name in index.files if Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} is not in the folder")
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(key, path, f"is no index of token shards ({error})", cure) from error
    for shard in (*index.train, *index.validation):
        expected = shard.tokens * BYTES[index.dtype]
        file = folder / shard.file
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            fault = "is missing" if size is None else f"has {size} bytes, not {expected}"
            raise ConfigError(key, file, f"{fault}, so it is not what {INDEX} describes", "make the folder again")
    return index


def is_whole(folder: Path) -> bool:
    """Whether a folder of token shards is complete and not damaged."""
    try:
        read_index(folder)
    except ConfigError:
        return False
    return True


def fingerprint_of(folder: Path, index: ShardIndex) -> str:
    """A hash of the tokens in a folder; 32 hexadecimal digits."""
    if index.fingerprint:
        return cache.hash_of_values(VERSION, index.fingerprint)
    content = cache.hash_of_files([folder / name for name in index.files])
    return cache.hash_of_values(VERSION, index.dtype, len(index.train), content)


def write_index(folder: Path, index: ShardIndex) -> None:
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(index)}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
