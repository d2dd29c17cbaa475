"""Documents of a Hugging Face dataset: the text of a row, streams that share files, and positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from titanlab.data.hf import StreamDocuments, documents, text_of
from titanlab.data.schema import HuggingFace
from titanlab.errors import ConfigError, DamagedPosition


class Rows:
    """A dataset of some files, with the methods of `datasets.IterableDataset` that streams call."""

    def __init__(self, files: list[list[Any]]) -> None:
        self.files, self.num_shards = files, len(files)
        self.at = 0

    def shard(self, *, num_shards: int, index: int, contiguous: bool) -> Rows:
        assert not contiguous
        return Rows(self.files[index::num_shards])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = [row for file in self.files for row in file]
        while self.at < len(rows):
            self.at += 1
            row = rows[self.at - 1]
            if isinstance(row, Exception):
                raise row
            yield {"text": row}


class Letters:
    """A tokenizer whose tokens are code points."""

    bos_id: int | None = 1
    eos_id: int | None = 2

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def config(**given: Any) -> HuggingFace:
    usual = {"path": "owner/name", "streams": 2, "validation_documents": 0, "validation_fraction": 0.0}
    return HuggingFace(**{**usual, **given})


def stream(files: list[list[Any]], number: int = 0, position: Any = None, **given: Any) -> StreamDocuments:
    return StreamDocuments(Rows(files), config(**given), Letters(), number, position)  # type: ignore[arg-type]


def texts(found: StreamDocuments, count: int) -> list[str]:
    return ["".join(map(chr, found.next()[1:-1])) for _ in range(count)]


@pytest.mark.parametrize(("value", "text"), [("a", "a"), ("", ""), (None, ""), ("a\ud800b", "a?b"), ("é🎉", "é🎉")])
def test_the_text_of_a_row(value: Any, text: str) -> None:
    assert text_of({"text": value, "n": 1}, config()) == text


@pytest.mark.parametrize("value", [5, [], {"a": 1}, b"a"])
def test_what_is_no_text_is_named(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        text_of({"text": value}, config())
    kind = type(value).__name__
    assert str(caught.value) == f"data.text_field=text: holds {kind}, no text; name another column"


def test_a_missing_column_is_named_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError) as caught:
        text_of({"body": "a", "n": 1}, config())
    assert str(caught.value) == "data.text_field=text: is no column of owner/name; it has: body, n"


def test_empty_texts_are_no_documents() -> None:
    assert list(documents(Rows([["a", "", None], ["b"]]), config())) == ["a", "b"]
    assert list(documents(Rows([]), config())) == []


def test_a_document_has_its_beginning_and_its_end() -> None:
    assert stream([["ab"], []]).next().tolist() == [1, 97, 98, 2]


def test_with_as_many_files_each_stream_has_its_own() -> None:
    files = [["a", "b"], ["c"], ["d"]]
    assert texts(stream(files, 0), 6) == ["a", "b", "d", "a", "b", "d"]
    assert texts(stream(files, 1), 3) == ["c", "c", "c"]


def test_with_fewer_files_streams_take_turns() -> None:
    files = [["a", "b", "c", "d", "e"]]
    assert texts(stream(files, 0), 4) == ["a", "c", "e", "a"]
    assert texts(stream(files, 1), 3) == ["b", "d", "b"]
    # Three streams share two files: 0 and 2 the first, 1 alone the second.
    files = [["a", "b", "c"], ["x", "y"]]
    assert [texts(stream(files, number, streams=3), 3) for number in range(3)] == [
        ["a", "c", "a"], ["x", "y", "x"], ["b", "b", "b"],
    ]  # fmt: skip


def test_documents_that_are_held_out_are_passed_over() -> None:
    files = [[str(number) for number in range(40)]]
    given: dict[str, Any] = {"streams": 1, "validation_fraction": 0.5}
    found = stream(files, **given)
    epoch = []
    while found.position()["epoch"] == 0:
        epoch += texts(found, 1)
    kept = set(epoch[:-1])
    assert 5 < len(kept) < 35
    # With a split of their own, none is held out.
    assert texts(stream(files, validation_split="test", **given), 40) == files[0]


def test_a_stream_goes_on_from_each_position() -> None:
    files = [["a", "", "b", "c", None, "d"]]
    whole = texts(stream(files, streams=1), 11)
    for stop in range(10):
        first = stream(files, streams=1)
        assert texts(first, stop) == whole[:stop]
        position = first.position()
        second = stream(files, position=position, streams=1)
        # Nothing is read, so nothing has moved.
        assert second.position() == position
        assert texts(second, 11 - stop) == whole[stop:]
        second.close()


def test_a_position_counts_what_was_seen_and_kept() -> None:
    found = stream([["a", "", "b"]], streams=1)
    assert found.position() == {"epoch": 0, "seen": 0, "kept": 0, "dataset": None}
    texts(found, 2)
    assert found.position() == {"epoch": 0, "seen": 3, "kept": 2, "dataset": {"at": 3}}
    texts(found, 1)
    assert found.position() == {"epoch": 1, "seen": 1, "kept": 1, "dataset": {"at": 1}}


POSITION = {"epoch": 0, "seen": 0, "kept": 0, "dataset": None}


@pytest.mark.parametrize(
    ("name", "value"), [("epoch", -1), ("seen", "1"), ("kept", True), ("seen", None), ("epoch", 0.5), ("kept", 2**62)]
)
def test_a_count_that_no_stream_saves_is_damage(name: str, value: Any) -> None:
    with pytest.raises(DamagedPosition, match=rf"^data\.parts\.1\.position\.{name}=.*: must be a whole number from 0"):
        stream([["a", "b"]], 1, POSITION | {name: value})


@pytest.mark.parametrize("state", [5, "x", []])
def test_a_state_that_is_no_mapping_is_damage(state: Any) -> None:
    with pytest.raises(DamagedPosition, match=r"^data\.parts\.0\.position\.dataset=.*: must be a mapping or null"):
        stream([["a"]], 0, POSITION | {"dataset": state}, streams=1)
    with pytest.raises(DamagedPosition, match=r"\.dataset=null: must be a mapping or null"):
        stream([["a"]], 0, {key: value for key, value in POSITION.items() if key != "dataset"}, streams=1)


def test_a_state_of_another_version_is_no_damage() -> None:
    with pytest.raises(ConfigError) as caught:
        stream([["a"]], 0, POSITION | {"dataset": {"at": "one"}}, streams=1)
    assert not isinstance(caught.value, DamagedPosition)
    assert "datasets does not understand it (TypeError); install the version of datasets" in str(caught.value)


def test_a_stream_without_documents_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        stream([["a"], ["", None]], 1, streams=2).next()
    said = "stream 1 has no document: the dataset is too small for so many; try data.streams=1"
    assert str(caught.value) == f"data.streams=2: {said}"


def test_a_part_that_cannot_be_read_is_named_and_an_error_of_the_network_is_not() -> None:
    with pytest.raises(ConfigError) as caught:
        texts(stream([["a", ValueError("bad\n  bytes")]], streams=1), 2)
    assert str(caught.value) == "data.path=owner/name: has a part that cannot be read (bad bytes); check its files"
    with pytest.raises(ConnectionError):
        texts(stream([["a", ConnectionError("gone")]], streams=1), 2)
