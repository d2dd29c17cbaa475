"""The index of token shards: what it counts, and each damage in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from titanlab.data.shards import (
    ShardIndex,
    TokenShard,
    fingerprint_of,
    is_whole,
    read_index,
    write_index,
)
from titanlab.errors import ConfigError


def made(folder: Path, **changes: Any) -> ShardIndex:
    """Three files and their index."""
    folder.mkdir(exist_ok=True)
    train = (TokenShard(file="train-00000.bin", tokens=10, documents=2), TokenShard(file="train-00001.bin", tokens=1))
    given: dict[str, Any] = {"dtype": "uint16", "vocab_size": 100, "bos_id": 1, "eos_id": 2}
    index = ShardIndex(
        **{**given, "train": train, "validation": (TokenShard(file="validation-00000.bin", tokens=5),), **changes}
    )
    for shard in (*index.train, *index.validation):
        (folder / shard.file).write_bytes(bytes(shard.tokens * (2 if index.dtype == "uint16" else 4)))
    write_index(folder, index)
    return index


def rewritten(folder: Path, **changes: Any) -> None:
    """Other values in the index; a value of ... is left out."""
    made(folder)
    content = json.loads((folder / "index.json").read_text()) | changes
    (folder / "index.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_index(folder, "k")
    assert not is_whole(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tokens_and_sequences_are_counted() -> None:
    index = ShardIndex(
        dtype="uint16",
        vocab_size=9,
        train=tuple(TokenShard(file=str(tokens), tokens=tokens) for tokens in (0, 1, 8, 9, 17)),
        validation=(TokenShard(file="v", tokens=3),),
    )
    assert (index.tokens("train"), index.tokens("validation")) == (35, 3)
    assert [shard.file for shard in index.split("validation")] == ["v"]
    # A sequence of 8 needs 9 tokens.
    assert (index.sequences("train", 8), index.sequences("validation", 8)) == (3, 0)
    assert index.sequences("train", 1) == 0 + 0 + 7 + 8 + 16
    empty = ShardIndex(dtype="uint16", vocab_size=9)
    assert (empty.tokens("train"), empty.sequences("train", 8)) == (0, 0)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_an_index_comes_back(tmp_path: Path, dtype: str) -> None:
    index = made(tmp_path, dtype=dtype, tokenizer="tokenizer.json", fingerprint="ab")
    assert read_index(tmp_path) == index
    assert is_whole(tmp_path)


def test_four_lines_are_enough(tmp_path: Path) -> None:
    left_out = dict.fromkeys(["bos_id", "eos_id", "tokenizer", "fingerprint", "train", "validation"], ...)
    rewritten(tmp_path, **left_out)
    assert read_index(tmp_path) == ShardIndex(dtype="uint16", vocab_size=100)
    rewritten(tmp_path, validation=[], train=[{"file": "train-00000.bin", "tokens": 10}])
    assert read_index(tmp_path).train == (TokenShard(file="train-00000.bin", tokens=10, documents=0),)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format": "x"}, "format 'x' version 1, not 'titanlab-tokens' 1"),
    "another version": ({"version": 2}, "format 'titanlab-tokens' version 2, not 'titanlab-tokens' 1"),
    "no version": ({"version": ...}, "format 'titanlab-tokens' version None, not 'titanlab-tokens' 1"),
    "another dtype": ({"dtype": "int16"}, "dtype 'int16', neither uint16 nor uint32"),
    "a dtype of a list": ({"dtype": []}, "Expected `str`, got `array` - at `$.dtype`"),
    "no token": ({"vocab_size": 0}, "vocab_size 0 does not fit uint16"),
    "too many tokens": ({"vocab_size": 65537}, "vocab_size 65537 does not fit uint16"),
    "infinitely many": ({"vocab_size": float("inf")}, "Expected `int`, got `float` - at `$.vocab_size`"),
    "a file of infinite length": ({"train": [{"file": "a", "tokens": float("inf")}]}, "Expected `int`, got `float`"),
    "a token of infinity": ({"eos_id": float("-inf")}, "Expected `int | null`, got `float` - at `$.eos_id`"),
    "a token of text": ({"bos_id": "x"}, "Expected `int | null`, got `str` - at `$.bos_id`"),
    "no number of tokens": ({"train": [{"file": "a"}]}, "Object missing required field `tokens` - at `$.train[0]`"),
    "a file of text": ({"train": ["a"]}, "Expected `object`, got `str` - at `$.train[0]`"),
    "train of a number": ({"train": 5}, "Expected `array`, got `int` - at `$.train`"),
    "a file elsewhere": ({"train": [{"file": "../a", "tokens": 1}]}, "'../a' is not in the folder"),
    "a file of the root": ({"validation": [{"file": "/a", "tokens": 1}]}, "'/a' is not in the folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_value_that_no_index_has_is_named(tmp_path: Path, name: str) -> None:
    changes, reason = BROKEN[name]
    rewritten(tmp_path, **changes)
    said = refusal(tmp_path)
    assert said.startswith(f"k={tmp_path / 'index.json'}: is no index of token shards ({reason}"[:120])
    assert said.endswith("; make the folder with `titanlab tokenize`")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_what_is_no_json_is_one_line(tmp_path: Path, content: bytes) -> None:
    made(tmp_path)
    (tmp_path / "index.json").write_bytes(content)
    assert refusal(tmp_path).startswith(f"k={tmp_path / 'index.json'}: cannot be read (")


@pytest.mark.parametrize("content", ["[]", "null", "5", '"x"'])
def test_json_that_is_no_object_is_one_line(tmp_path: Path, content: str) -> None:
    made(tmp_path)
    (tmp_path / "index.json").write_text(content)
    assert ": is no index of token shards (" in refusal(tmp_path)


def test_a_folder_without_an_index_is_one_line(tmp_path: Path) -> None:
    cure = "make the folder with `titanlab tokenize`"
    assert refusal(tmp_path) == f"k={tmp_path}: has no index.json; {cure}"
    assert refusal(tmp_path / "none") == f"k={tmp_path / 'none'}: is no folder; {cure}"
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file") == f"k={tmp_path / 'file'}: is no folder; {cure}"


@pytest.mark.parametrize(
    ("size", "fault"), [(None, "is missing"), (0, "has 0 bytes, not 10"), (9, "has 9 bytes, not 10"), (12, "has 12")]
)
def test_a_file_of_another_length_is_named(tmp_path: Path, size: int | None, fault: str) -> None:
    made(tmp_path)
    file = tmp_path / "validation-00000.bin"
    file.unlink()
    if size is not None:
        file.write_bytes(bytes(size))
    said = refusal(tmp_path)
    assert said.startswith(f"k={file}: {fault}")
    assert said.endswith(", so it is not what index.json describes; make the folder again")


@pytest.mark.parametrize("name", ["..", ".", "", "a\0"])
def test_a_name_of_no_file_is_one_line(tmp_path: Path, name: str) -> None:
    rewritten(tmp_path, train=[{"file": name, "tokens": 1}])
    refusal(tmp_path)


def test_the_fingerprint_is_of_the_tokens(tmp_path: Path) -> None:
    index = made(tmp_path / "a")
    first = fingerprint_of(tmp_path / "a", index)
    assert len(first) == 32
    made(tmp_path / "b")
    assert fingerprint_of(tmp_path / "b", index) == first
    (tmp_path / "b" / "train-00001.bin").write_bytes(b"\1\0")
    assert fingerprint_of(tmp_path / "b", index) != first
    # The same bytes, of which one file more is held out.
    moved = made(tmp_path / "c", train=index.train[:1], validation=(index.train[1], *index.validation))
    assert fingerprint_of(tmp_path / "c", moved) != first


def test_a_fingerprint_that_the_index_has_is_taken(tmp_path: Path) -> None:
    index = ShardIndex(dtype="uint16", vocab_size=9, fingerprint="ab", train=(TokenShard(file="none", tokens=3),))
    other = ShardIndex(dtype="uint16", vocab_size=9, fingerprint="cd")
    assert fingerprint_of(tmp_path, index) == fingerprint_of(tmp_path / "elsewhere", index)
    assert fingerprint_of(tmp_path, index) != fingerprint_of(tmp_path, other)
