"""Folders of token shards: every document once, an index that is checked, and sequences that are where they were."""

from __future__ import annotations

import json

import numpy as np
import pytest

from titanlab.data.indexed import Split, check_tokens
from titanlab.data.shards import (
    ShardIndex,
    TokenShard,
    fingerprint_of,
    is_whole,
    pieces_of,
    read_index,
    write_documents,
    write_index,
)
from titanlab.errors import ConfigError


def made(folder, **changes):
    """Three files and their index."""
    folder.mkdir(exist_ok=True)
    train = (TokenShard(file="train-00000.bin", tokens=10, documents=2), TokenShard(file="train-00001.bin", tokens=1))
    given = {"dtype": "uint16", "vocab_size": 100, "bos_id": 1, "eos_id": 2}
    index = ShardIndex(
        **{**given, "train": train, "validation": (TokenShard(file="validation-00000.bin", tokens=5),), **changes}
    )
    for shard in (*index.train, *index.validation):
        (folder / shard.file).write_bytes(bytes(shard.tokens * (2 if index.dtype == "uint16" else 4)))
    write_index(folder, index)
    return index


def rewritten(folder, **changes):
    """Other values in the index; a value of ... is left out."""
    made(folder)
    content = json.loads((folder / "index.json").read_text()) | changes
    (folder / "index.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def refusal(folder):
    with pytest.raises(ConfigError) as caught:
        read_index(folder, "k")
    assert not is_whole(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


BROKEN = {
    "another format": ({"format": "x"}, "format 'x' version 1, not 'titanlab-tokens' 1"),
    "another version": ({"version": 2}, "format 'titanlab-tokens' version 2, not 'titanlab-tokens' 1"),
    "another dtype": ({"dtype": "int16"}, "dtype 'int16', neither uint16 nor uint32"),
    "no token": ({"vocab_size": 0}, "vocab_size 0 does not fit uint16"),
    "too many tokens": ({"vocab_size": 65537}, "vocab_size 65537 does not fit uint16"),
    "a file of infinite length": ({"train": [{"file": "a", "tokens": float("inf")}]}, "Expected `int`, got `float`"),
    "no number of tokens": ({"train": [{"file": "a"}]}, "Object missing required field `tokens` - at `$.train[0]`"),
    "a file elsewhere": ({"train": [{"file": "../a", "tokens": 1}]}, "'../a' is not in the folder"),
    "a file of the root": ({"validation": [{"file": "/a", "tokens": 1}]}, "'/a' is not in the folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_value_that_no_index_has_is_named(tmp_path, name):
    changes, reason = BROKEN[name]
    rewritten(tmp_path, **changes)
    said = refusal(tmp_path)
    assert said.startswith(f"k={tmp_path / 'index.json'}: is no index of token shards ({reason}"[:120])
    assert said.endswith("; make the folder with `titanlab tokenize`")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_what_is_no_json_is_one_line(tmp_path, content):
    made(tmp_path)
    (tmp_path / "index.json").write_bytes(content)
    assert refusal(tmp_path).startswith(f"k={tmp_path / 'index.json'}: cannot be read (")


def test_a_folder_without_an_index_is_one_line(tmp_path):
    cure = "make the folder with `titanlab tokenize`"
    assert refusal(tmp_path) == f"k={tmp_path}: has no index.json; {cure}"
    assert refusal(tmp_path / "none") == f"k={tmp_path / 'none'}: is no folder; {cure}"
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file") == f"k={tmp_path / 'file'}: is no folder; {cure}"


@pytest.mark.parametrize(
    ("size", "fault"), [(None, "is missing"), (0, "has 0 bytes, not 10"), (9, "has 9 bytes, not 10"), (12, "has 12")]
)
def test_a_file_of_another_length_is_named(tmp_path, size, fault):
    made(tmp_path)
    file = tmp_path / "validation-00000.bin"
    file.unlink()
    if size is not None:
        file.write_bytes(bytes(size))
    said = refusal(tmp_path)
    assert said.startswith(f"k={file}: {fault}")
    assert said.endswith(", so it is not what index.json describes; make the folder again")


def test_the_fingerprint_is_of_the_tokens(tmp_path):
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


class Letters:
    """A tokenizer whose tokens are the code points plus ten."""

    vocab_size = 1000
    bos_id = 1
    eos_id = 2
    separator = ""

    def __init__(self):
        self.calls = []

    def encode(self, text):
        return [ord(letter) + 10 for letter in text]

    def encode_many(self, texts):
        self.calls.append(list(texts))
        return [self.encode(text) for text in texts]

    def decode(self, tokens):
        return self.separator + "".join(chr(token - 10) for token in tokens)


def written(folder, texts, *, tokenizer=None, held_out=lambda text: False, **given):
    folder.mkdir(exist_ok=True)
    file = folder.parent / "tokenizer.model"
    file.write_bytes(b"its file")
    tokenizer = tokenizer or Letters()
    tokenizer.file = file
    lines = []
    index = write_documents(
        folder,
        texts,
        tokenizer=tokenizer,
        fingerprint="ab",
        report=lines.append,
        held_out=held_out,
        **given,
    )
    assert read_index(folder) == index
    assert len(lines) == 1
    assert "a document" in lines[0]
    return index


def tokens_of(folder, index, split):
    """The tokens of each file."""
    dtype = np.dtype(index.dtype).newbyteorder("<")
    return [np.fromfile(folder / shard.file, dtype=dtype).tolist() for shard in index.split(split)]


def of(text):
    return [1, *Letters().encode(text), 2]


def test_each_document_has_its_beginning_and_its_end(tmp_path):
    index = written(tmp_path / "t", ["ab", "", "c"])
    assert tokens_of(tmp_path / "t", index, "train") == [[*of("ab"), 1, 2, *of("c")]]
    assert index.validation == ()
    assert (index.dtype, index.vocab_size, index.bos_id, index.eos_id) == ("uint16", 1000, 1, 2)
    assert (index.tokenizer, index.fingerprint) == ("tokenizer.model", "ab")
    assert [(shard.file, shard.tokens, shard.documents) for shard in index.train] == [("train-00000.bin", 9, 3)]
    assert (tmp_path / "t" / "tokenizer.model").read_bytes() == b"its file"


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_the_dtype_holds_the_last_token_of_the_vocabulary(tmp_path, size, dtype):
    tokenizer = Letters()
    tokenizer.vocab_size = size
    index = written(tmp_path / "t", [chr(size - 11)], tokenizer=tokenizer)
    assert (index.dtype, tokens_of(tmp_path / "t", index, "train")) == (dtype, [[1, size - 1, 2]])


def test_a_file_ends_after_the_document_with_which_it_is_full(tmp_path):
    index = written(tmp_path / "t", ["ab", "c", "defgh", "i"], shard_tokens=7)
    assert [(shard.tokens, shard.documents) for shard in index.train] == [(7, 2), (7, 1), (3, 1)]
    assert tokens_of(tmp_path / "t", index, "train") == [[*of("ab"), *of("c")], of("defgh"), of("i")]
    assert [shard.file for shard in index.train] == [f"train-{number:05d}.bin" for number in range(3)]


@pytest.mark.parametrize(("fraction", "kept"), [(0.01, 8), (0.3, 7), (0.5, 5), (0.9, 5), (1.0, 5)])
def test_at_least_two_tokens_and_at_most_half_of_the_last_file_are_held_out(tmp_path, fraction, kept):
    index = written(tmp_path / "t", ["abcdefgh"], tail_fraction=fraction)
    assert (index.tokens("train"), index.tokens("validation")) == (kept, 10 - kept)
    (first,), (second,) = (tokens_of(tmp_path / "t", index, split) for split in ("train", "validation"))
    assert first + second == of("abcdefgh")


@pytest.mark.parametrize(("separator", "calls"), [("", [["a\n", "bcd"]]), (" ", [["a\nbcd"]])])
def test_a_long_document_is_encoded_in_pieces_if_the_tokenizer_allows(tmp_path, monkeypatch, separator, calls):
    monkeypatch.setattr(pieces_of, "__defaults__", (3,))
    tokenizer = Letters()
    tokenizer.separator = separator
    index = written(tmp_path / "t", ["a\nbcd"], tokenizer=tokenizer)
    assert tokenizer.calls == calls
    assert tokens_of(tmp_path / "t", index, "train") == [of("a\nbcd")]


def files_of(folder, *files, dtype="uint16", vocab_size=1000):
    """Files of these tokens."""
    shards = []
    for number, tokens in enumerate(files):
        np.array(tokens, dtype=np.dtype(dtype).newbyteorder("<")).tofile(folder / f"{number}.bin")
        shards.append(TokenShard(file=f"{number}.bin", tokens=len(tokens)))
    return ShardIndex(dtype=dtype, vocab_size=vocab_size, bos_id=1, eos_id=2, train=tuple(shards))


def rows(split, *numbers):
    batch = split.gather(np.array(numbers, dtype=np.int64))
    assert batch.tokens.dtype == batch.labels.dtype == np.int64
    assert batch.tokens.shape == batch.labels.shape == (len(numbers), split.seq_len)
    return batch.tokens.tolist(), batch.labels.tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_label_is_the_next_token(tmp_path, dtype):
    split = Split(tmp_path, files_of(tmp_path, range(10), dtype=dtype), "train", 3)
    assert split.sequences == 3
    assert rows(split, 0, 1, 2) == ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    # In any order, and one of them twice.
    assert rows(split, 2, 0, 2) == ([[6, 7, 8], [0, 1, 2], [6, 7, 8]], [[7, 8, 9], [1, 2, 3], [7, 8, 9]])
    assert rows(split) == ([], [])


def test_sequences_of_several_files_have_one_numbering(tmp_path):
    index = files_of(tmp_path, range(7), [50], [], range(100, 109), range(200, 203), range(300, 304))
    split = Split(tmp_path, index, "train", 3)
    # Files of 2, 0, 0, 2, 0 and 1 sequences.
    assert split.sequences == 5
    expected = [[0, 1, 2], [3, 4, 5], [100, 101, 102], [103, 104, 105], [300, 301, 302]]
    assert rows(split, 0, 1, 2, 3, 4) == (expected, [[each + 1 for each in row] for row in expected])
    assert rows(split, 4, 1, 2)[0] == [expected[4], expected[1], expected[2]]


def test_a_token_beyond_the_vocabulary_is_named(tmp_path):
    check_tokens(tmp_path, files_of(tmp_path, [5, 9], [], vocab_size=10))
    index = files_of(tmp_path, [5, 9], [7, 10, 3], vocab_size=10)
    with pytest.raises(ConfigError) as caught:
        check_tokens(tmp_path, index, "k")
    said = "has token 10, and index.json says vocab_size 10; check dtype and vocab_size in the index"
    assert str(caught.value) == f"k={tmp_path / '1.bin'}: {said}"
