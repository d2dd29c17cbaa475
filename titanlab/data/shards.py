"""Writes folders of token shards from documents; reads the index of a folder, and checks that the folder is complete.

index.json               format, version, dtype, vocab_size, special tokens, fingerprint, files
train-00000.bin …        little-endian uint16 or uint32, document after document
validation-00000.bin …   the same, of held-out documents
tokenizer.model          or tokenizer.json; optional
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.data import cache
from titanlab.data.contract import Report
from titanlab.data.tokenizers import Tokenizer, keep, separators_in_words, separators_of
from titanlab.errors import ConfigError
from titanlab.system import parse_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

INDEX = "index.json"
FORMAT = "titanlab-tokens"
VERSION = 1
BYTES = {"uint16": 2, "uint32": 4}
"""Bytes of one token, by the index's dtype."""

SHARD_TOKENS = 1 << 30
"""A file ends after the document with which it reaches this many tokens."""
_BATCH_CHARACTERS = 2_000_000
_PIECE_CHARACTERS = 1 << 18
_REPORT_TOKENS = 50_000_000


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """One file of tokens; `documents`: the number of documents in it, or 0 if it is unknown."""

    file: str
    tokens: int
    documents: int = 0


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The content of `index.json`.

    Attributes:
        dtype: `uint16` or `uint32`.
        vocab_size: every token id is below this number.
        bos_id, eos_id: the tokens before and after each document; None: there is no such token.
        tokenizer: the name of the tokenizer's file in the folder; None without a tokenizer.
        fingerprint: a hash that stands for the tokens; None: it is computed from the files.
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
    def shards(self) -> tuple[TokenShard, ...]:
        return (*self.train, *self.validation)

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.split(split))

    def split(self, name: str) -> tuple[TokenShard, ...]:
        return self.train if name == "train" else self.validation

    def sequences(self, split: str, seq_len: int) -> int:
        """Number of complete sequences; each needs one token more than `seq_len`, the label of its last token."""
        return sum(max(0, shard.tokens - 1) // seq_len for shard in self.split(split))


def read_index(folder: Path, key: str = "data.folder") -> ShardIndex:
    """Read and check a folder's index, and check that the files have the lengths that the index says.

    Raises:
        ConfigError: the index is missing or not valid, or a file is missing or has another length.
    """
    path = folder / INDEX
    cure = "make the folder with `titanlab tokenize`"
    if not folder.is_dir():
        raise ConfigError(key, folder, "is not a folder", cure)
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
        if outside := [shard.file for shard in index.shards if Path(shard.file).name != shard.file]:
            raise ValueError(f"{outside[0]!r} is not in the folder")
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(key, path, f"is not an index of token shards ({error})", cure) from error
    for shard in index.shards:
        expected = shard.tokens * BYTES[index.dtype]
        file = folder / shard.file
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            fault = "is missing" if size is None else f"has {size} bytes, not {expected}"
            raise ConfigError(key, file, f"{fault}, so it is not what {INDEX} describes", "make the folder again")
    return index


def is_whole(folder: Path) -> bool:
    try:
        read_index(folder)
    except ConfigError:
        return False
    return True


def fingerprint_of(folder: Path, index: ShardIndex) -> str:
    if index.fingerprint:
        return cache.hash_of_values(VERSION, index.fingerprint)
    content = cache.hash_of_files([folder / shard.file for shard in index.shards])
    return cache.hash_of_values(VERSION, index.dtype, len(index.train), content)


def write_documents(
    folder: Path,
    documents: Iterable[str],
    *,
    tokenizer: Tokenizer,
    fingerprint: str,
    report: Report,
    held_out: Callable[[str], bool],
    tail_fraction: float = 0.0,
    shard_tokens: int = SHARD_TOKENS,
) -> ShardIndex:
    """Tokenise documents into a folder that exists and is empty.

    Args:
        documents: texts; the tokens of each get the tokens of `separators_of` around them.
        fingerprint: a hash of the documents and the way to tokenise them, written to the index.
        held_out: tells whether a document goes to the validation split. If all documents go to the same split, the last
            tokens become the validation split: the share `tail_fraction` of all tokens.
    """
    for line in separators_in_words(tokenizer):
        report(line)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    splits = {name: _SplitWriter(folder, name, dtype, shard_tokens) for name in ("train", "validation")}
    with splits["train"], splits["validation"]:
        next_report = _REPORT_TOKENS
        for text, tokens in _tokenised(documents, tokenizer):
            splits["validation" if held_out(text) else "train"].append(tokens)
            if (done := sum(split.tokens for split in splits.values())) >= next_report:
                report(f"tokenised {done / 1e6:,.0f} million tokens")
                next_report += _REPORT_TOKENS
    shards = {name: split.shards for name, split in splits.items()}
    if tail_fraction > 0 and any(shards.values()) and not all(shards.values()):
        shards = _cut_tail(folder, shards["train"] or shards["validation"], tail_fraction, BYTES[dtype])
    index = ShardIndex(
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        bos_id=separators_of(tokenizer).begin,
        eos_id=separators_of(tokenizer).end,
        tokenizer=keep(tokenizer.file, folder),
        fingerprint=fingerprint,
        train=tuple(shards["train"]),
        validation=tuple(shards["validation"]),
    )
    write_index(folder, index)
    return index


def write_index(folder: Path, index: ShardIndex) -> None:
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(index)}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def pieces_of(text: str, size: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a text after line ends into pieces of at most `size` characters; joined, the pieces are the text again."""
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1
        # If the line is longer than `size`, cut inside the line.
        end = end if end > start else start + size
        yield text[start:end]
        start = end
    yield text[start:]


def _tokenised(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[str, npt.NDArray[np.uint32]]]:
    """Each document with its tokens; encodes many documents at a time, and long documents in pieces."""
    # Imported here: the checks of an index need no numpy.
    import numpy as np

    # Cut texts only if two pieces, encoded one by one, decode to the same text: some tokenizers would add a space.
    cuttable = tokenizer.decode(tokenizer.encode("a\n") + tokenizer.encode("b")) == "a\nb"
    around = separators_of(tokenizer)
    before, after = ([] if token is None else [token] for token in (around.begin, around.end))
    rest = iter(documents)
    while True:
        batch: list[str] = []
        size = 0
        while size < _BATCH_CHARACTERS and (text := next(rest, None)) is not None:
            batch.append(text)
            size += len(text)
        if not batch:
            return
        cut = [list(pieces_of(text)) if cuttable else [text] for text in batch]
        encoded = iter(tokenizer.encode_many([piece for pieces in cut for piece in pieces]))
        for text, pieces in zip(batch, cut, strict=True):
            parts = [before, *(next(encoded) for _ in pieces), after]
            yield text, np.concatenate([np.asarray(part, dtype=np.uint32) for part in parts])


def _cut_tail(folder: Path, shards: list[TokenShard], fraction: float, token_bytes: int) -> dict[str, list[TokenShard]]:
    """Make the only split the training split, and move its last tokens into a validation file."""
    shards = [
        replace(shard, file=(folder / shard.file).rename(folder / f"train-{number:05d}.bin").name)
        for number, shard in enumerate(shards)
    ]
    last = shards[-1]
    wanted = max(2, round(fraction * sum(shard.tokens for shard in shards)))
    kept = max(last.tokens - wanted, last.tokens // 2)
    with (folder / last.file).open("r+b") as file:
        file.seek(kept * token_bytes)
        (folder / "validation-00000.bin").write_bytes(file.read())
        file.truncate(kept * token_bytes)
    shards[-1] = replace(last, tokens=kept)
    return {"train": shards, "validation": [TokenShard(file="validation-00000.bin", tokens=last.tokens - kept)]}


class _SplitWriter:
    """Appends documents to `<name>-<number>.bin`, and begins a new file when the last one is long enough."""

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int) -> None:
        self.shards: list[TokenShard] = []
        self.tokens = 0
        self._folder, self._name, self._dtype, self._shard_tokens = folder, name, dtype, shard_tokens
        self._open = contextlib.ExitStack()

    def __enter__(self) -> _SplitWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def append(self, tokens: npt.NDArray[np.uint32]) -> None:
        """Write one document: its tokens, uint32 `[tokens]`."""
        if not self.shards or self.shards[-1].tokens >= self._shard_tokens:
            self._open.close()
            name = f"{self._name}-{len(self.shards):05d}.bin"
            self.shards.append(TokenShard(file=name, tokens=0))
            self._file = self._open.enter_context((self._folder / name).open("wb"))
        self._file.write(tokens.astype(f"<{self._dtype[0]}{BYTES[self._dtype]}").data)
        self.tokens += len(tokens)
        last = self.shards[-1]
        self.shards[-1] = replace(last, tokens=last.tokens + len(tokens), documents=last.documents + 1)
