"""Writing of token shards: documents become a folder of files and their index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from titanlab.data.contract import Report
from titanlab.data.shard_index import BYTES, ShardIndex, TokenShard, dtype_for, write_index
from titanlab.data.tokenizers import Tokenizer, keep, separators_in_words, separators_of

SHARD_TOKENS = 1 << 30
"""A file ends after the document with which it reaches this many tokens."""
_BATCH_CHARACTERS = 2_000_000
_PIECE_CHARACTERS = 1 << 18
_REPORT_TOKENS = 50_000_000


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
        documents: texts; each becomes beginning-of-text, its tokens, end-of-text, as far as `separators_of` has them.
        fingerprint: hash of the documents and of their tokenisation, written to the index.
        tail_fraction: fraction of the tokens at the end that becomes the validation split if `held_out` chose no
            document or all of them, as it may if there are very few.
    """
    for line in separators_in_words(tokenizer):
        report(line)
    dtype = dtype_for(tokenizer.vocab_size)
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


def pieces_of(text: str, size: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a text into pieces of about `size` characters after line ends; the pieces joined are the text."""
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1
        # A line longer than `size` is cut inside.
        end = end if end > start else start + size
        yield text[start:end]
        start = end
    yield text[start:]


def _tokenised(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[str, npt.NDArray[np.uint32]]]:
    """Each document with its tokens; encodes many documents at a time, and long documents in pieces."""
    cuttable = _can_encode_pieces(tokenizer)
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield from zip(batch, _encoded(batch, tokenizer, cuttable=cuttable), strict=True)
            batch, size = [], 0
    if batch:
        yield from zip(batch, _encoded(batch, tokenizer, cuttable=cuttable), strict=True)


def _encoded(texts: list[str], tokenizer: Tokenizer, *, cuttable: bool) -> Iterator[npt.NDArray[np.uint32]]:
    cut = [list(pieces_of(text)) if cuttable else [text] for text in texts]
    encoded = iter(tokenizer.encode_many([piece for pieces in cut for piece in pieces]))
    around = separators_of(tokenizer)
    before, after = ([] if token is None else [token] for token in (around.begin, around.end))
    for pieces in cut:
        parts = [before, *(next(encoded) for _ in pieces), after]
        yield np.concatenate([np.asarray(part, dtype=np.uint32) for part in parts])


def _can_encode_pieces(tokenizer: Tokenizer) -> bool:
    """Whether a text that is encoded in two pieces still decodes to itself; some tokenizers add a space."""
    return tokenizer.decode(tokenizer.encode("a\n") + tokenizer.encode("b")) == "a\nb"


def _cut_tail(folder: Path, shards: list[TokenShard], fraction: float, token_bytes: int) -> dict[str, list[TokenShard]]:
    """Move the last tokens of the only split into a validation file."""
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
        self._folder, self._name, self._shard_tokens = folder, name, shard_tokens
        self._file: IO[bytes] | None = None
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def __enter__(self) -> _SplitWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, tokens: npt.NDArray[np.uint32]) -> None:
        """Write one document; uint32 `[tokens]`."""
        if self._file is None or self.shards[-1].tokens >= self._shard_tokens:
            if self._file is not None:
                self._file.close()
            name = f"{self._name}-{len(self.shards):05d}.bin"
            self.shards.append(TokenShard(file=name, tokens=0))
            self._file = (self._folder / name).open("wb")
        self._file.write(tokens.astype(self._dtype).data)
        self.tokens += len(tokens)
        last = self.shards[-1]
        self.shards[-1] = replace(last, tokens=last.tokens + len(tokens), documents=last.documents + 1)
