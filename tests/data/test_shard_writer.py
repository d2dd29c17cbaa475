"""Token shards that are written: every document once, cut between documents, and a split that is never empty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titanlab.data import shards
from titanlab.data.shards import ShardIndex, pieces_of, read_index, write_documents


class Letters:
    """A tokenizer whose tokens are the code points plus ten."""

    vocab_size = 1000
    bos_id: int | None = 1
    eos_id: int | None = 2
    separator = ""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode(self, text: str) -> list[int]:
        return [ord(letter) + 10 for letter in text]

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        self.calls.append(list(texts))
        return [self.encode(text) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        return self.separator + "".join(chr(token - 10) for token in tokens)


def written(
    folder: Path,
    texts: list[str],
    *,
    tokenizer: Letters | None = None,
    held_out: Callable[[str], bool] = lambda text: False,
    **given: float,
) -> ShardIndex:
    folder.mkdir(exist_ok=True)
    file = folder.parent / "tokenizer.model"
    file.write_bytes(b"its file")
    tokenizer = tokenizer or Letters()
    tokenizer.file = file
    lines: list[str] = []
    index = write_documents(
        folder,
        texts,
        tokenizer=tokenizer,  # type: ignore[arg-type]
        fingerprint="ab",
        report=lines.append,
        held_out=held_out,
        **given,  # type: ignore[arg-type]
    )
    assert read_index(folder) == index
    assert len(lines) == 1
    assert "a document" in lines[0]
    return index


def tokens_of(folder: Path, index: ShardIndex, split: str) -> list[list[int]]:
    """The tokens of each file."""
    dtype = np.dtype(index.dtype).newbyteorder("<")
    return [np.fromfile(folder / shard.file, dtype=dtype).tolist() for shard in index.split(split)]


def of(text: str) -> list[int]:
    return [1, *Letters().encode(text), 2]


def test_each_document_has_its_beginning_and_its_end(tmp_path: Path) -> None:
    index = written(tmp_path / "t", ["ab", "", "c"])
    assert tokens_of(tmp_path / "t", index, "train") == [[*of("ab"), 1, 2, *of("c")]]
    assert index.validation == ()
    assert (index.dtype, index.vocab_size, index.bos_id, index.eos_id) == ("uint16", 1000, 1, 2)
    assert (index.tokenizer, index.fingerprint) == ("tokenizer.model", "ab")
    assert [(shard.file, shard.tokens, shard.documents) for shard in index.train] == [("train-00000.bin", 9, 3)]
    assert (tmp_path / "t" / "tokenizer.model").read_bytes() == b"its file"


@pytest.mark.parametrize(("bos", "eos", "expected"), [(None, 2, [107, 2]), (1, None, [1, 107]), (None, None, [107])])
def test_a_token_that_the_tokenizer_lacks_is_left_out(
    tmp_path: Path, bos: int | None, eos: int | None, expected: list[int]
) -> None:
    tokenizer = Letters()
    tokenizer.bos_id, tokenizer.eos_id = bos, eos
    index = written(tmp_path / "t", ["a"], tokenizer=tokenizer)
    assert (index.bos_id, index.eos_id) == (bos, eos)
    assert tokens_of(tmp_path / "t", index, "train") == [expected]


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    tokenizer = Letters()
    tokenizer.vocab_size = 65537
    index = written(tmp_path / "t", ["a"], tokenizer=tokenizer)
    assert (index.dtype, (tmp_path / "t" / "train-00000.bin").read_bytes()) == (
        "uint32",
        b"\1\0\0\0\x6b\0\0\0\2\0\0\0",
    )


def test_without_documents_there_is_no_file(tmp_path: Path) -> None:
    index = written(tmp_path / "t", [], tail_fraction=0.5)
    assert (index.train, index.validation) == ((), ())
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["index.json", "tokenizer.model"]


def test_documents_are_held_out(tmp_path: Path) -> None:
    index = written(tmp_path / "t", ["a", "bx", "c", "dx"], held_out=lambda text: "x" in text, tail_fraction=0.5)
    assert tokens_of(tmp_path / "t", index, "train") == [[*of("a"), *of("c")]]
    assert tokens_of(tmp_path / "t", index, "validation") == [[*of("bx"), *of("dx")]]
    assert (index.train[0].documents, index.validation[0].documents) == (2, 2)


def test_a_file_ends_after_the_document_with_which_it_is_full(tmp_path: Path) -> None:
    index = written(tmp_path / "t", ["ab", "c", "defgh", "i"], shard_tokens=7)
    assert [(shard.tokens, shard.documents) for shard in index.train] == [(7, 2), (7, 1), (3, 1)]
    assert tokens_of(tmp_path / "t", index, "train") == [[*of("ab"), *of("c")], of("defgh"), of("i")]
    assert [shard.file for shard in index.train] == [f"train-{number:05d}.bin" for number in range(3)]


@pytest.mark.parametrize("held_out", [True, False])
def test_the_tail_is_held_out_where_the_documents_were_all_of_one_split(tmp_path: Path, held_out: bool) -> None:
    texts = ["abc", "defgh"]
    index = written(tmp_path / "t", texts, held_out=lambda text: held_out, tail_fraction=0.25, shard_tokens=5)
    whole = [*of("abc"), *of("defgh")]
    assert tokens_of(tmp_path / "t", index, "train") == [whole[:5], whole[5:-3]]
    assert tokens_of(tmp_path / "t", index, "validation") == [whole[-3:]]
    assert [shard.file for shard in index.train] == ["train-00000.bin", "train-00001.bin"]


@pytest.mark.parametrize(("fraction", "kept"), [(0.01, 8), (0.3, 7), (0.5, 5), (0.9, 5), (1.0, 5)])
def test_at_least_two_tokens_and_at_most_half_of_the_last_file_are_held_out(
    tmp_path: Path, fraction: float, kept: int
) -> None:
    index = written(tmp_path / "t", ["abcdefgh"], tail_fraction=fraction)
    assert (index.tokens("train"), index.tokens("validation")) == (kept, 10 - kept)
    (first,), (second,) = (tokens_of(tmp_path / "t", index, split) for split in ("train", "validation"))
    assert first + second == of("abcdefgh")


def test_many_documents_are_encoded_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_BATCH_CHARACTERS", 4)
    tokenizer = Letters()
    index = written(tmp_path / "t", ["ab", "cd", "e", "fghij", "k"], tokenizer=tokenizer)
    assert tokenizer.calls == [["ab", "cd"], ["e", "fghij"], ["k"]]
    assert index.train[0].documents == 5


@pytest.mark.parametrize(("separator", "calls"), [("", [["a\n", "bcd"]]), (" ", [["a\nbcd"]])])
def test_a_long_document_is_encoded_in_pieces_if_the_tokenizer_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, calls: list[list[str]]
) -> None:
    monkeypatch.setattr(pieces_of, "__defaults__", (3,))
    tokenizer = Letters()
    tokenizer.separator = separator
    index = written(tmp_path / "t", ["a\nbcd"], tokenizer=tokenizer)
    assert tokenizer.calls == calls
    assert tokens_of(tmp_path / "t", index, "train") == [of("a\nbcd")]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", [""]),
        ("abc", ["abc"]),
        ("abcd", ["abc", "d"]),
        ("a\nbc", ["a\n", "bc"]),
        ("\n\n\n\n", ["\n\n\n", "\n"]),
        ("ab\ncd\nef", ["ab\n", "cd\n", "ef"]),
        ("abcdef\n", ["abc", "def", "\n"]),
    ],
)
def test_pieces_end_after_lines(text: str, pieces: list[str]) -> None:
    assert list(pieces_of(text, 3)) == pieces


def test_long_documents_are_encoded_in_pieces_and_stay_whole() -> None:
    for written in ("a\nbb\n\nccc" * 50, "x" * 95, "", "\n" * 40, "ab\n"):
        pieces = list(pieces_of(written, 10))
        assert "".join(pieces) == written
        assert all(len(piece) <= 10 for piece in pieces)


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_REPORT_TOKENS", 2_000_000)
    lines: list[str] = []
    folder = tmp_path / "t"
    folder.mkdir()
    (tmp_path / "tokenizer.json").write_text("{}")

    class Many(Letters):
        file = tmp_path / "tokenizer.json"

        def encode_many(self, texts: list[str]) -> list[list[int]]:
            return [[5] * 1_499_998 for _ in texts]

    write_documents(
        folder,
        ["a", "b", "c"],
        tokenizer=Many(),  # type: ignore[arg-type]
        fingerprint="",
        report=lines.append,
        held_out=lambda text: text == "b",
    )
    assert lines[1:] == ["tokenised 3 million tokens", "tokenised 4 million tokens"]
