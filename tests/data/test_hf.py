"""data=hf over local JSONL and parquet: streamed, resumed and held out by the library that reads the hub."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import operator
from dataclasses import replace

import numpy as np
import pytest

from tests.data.conftest import silent, text
from tests.data.test_streams import global_steps
from tests.refusals import refusal
from titanlab.data import hf, source
from titanlab.data.corpus import is_held_out
from titanlab.data.hf import StreamDocuments
from titanlab.data.schema import HuggingFace
from titanlab.data.tokenizers import load
from titanlab.errors import ConfigError, DamagedPosition

TEXTS = {text(100 * file + row, 5 + 7 * row) for file in range(5) for row in range(12)}


@pytest.fixture
def config(json_lines, model_file, cache):
    """Five files for four streams: one of them reads two."""
    found = made(json_lines / "*.jsonl", model_file)
    source.prepare(found, report=silent)
    return found


def made(files, model_file, **changes):
    how = {
        "path": "json",
        "data_files": [str(files)],
        "tokenizer": model_file and str(model_file),
        "vocab_size": 330,
        "validation_fraction": 0.1,
        "streams": 12,
    }
    return HuggingFace(**{**how, **changes})


def changed(config, **changes):
    return HuggingFace(**{**vars(config), **changes})


def tokens_of_stream(config, count):
    """The first tokens of each virtual stream, put together from its sequences."""
    batches, _ = global_steps(config, ranks=1, steps=count, batch=config.streams)
    found = {number: [] for number in range(config.streams)}
    for batch in batches:
        for number, row in enumerate(batch):
            found[number] += row.tolist()
    return found


@pytest.mark.parametrize("streams", [2, 12])
def test_streams_share_the_documents(config, streams):
    tokenizer = source.tokenizer(config)
    assert tokenizer is not None
    held_out = {each for each in TEXTS if is_held_out(each, 0.1)}
    seen = []
    dataset = hf.open_dataset(config, "train")
    for number in range(streams):
        documents = hf.StreamDocuments(dataset, changed(config, streams=streams), tokenizer, number, None)
        while documents.position()["epoch"] == 0:
            tokens = documents.next().tolist()
            if documents.position()["epoch"] == 0:
                assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
                seen.append(tokenizer.decode(tokens))
        documents.close()
    assert sorted(seen) == sorted(TEXTS - held_out)


@pytest.mark.parametrize(
    ("before", "after"), [(1, 3), *(pytest.param(*each, marks=pytest.mark.full) for each in [(2, 1), (4, 2), (3, 4)])]
)
def test_order_for_ranks_and_resumption(config, before, after):
    # A step has ten sequences of each stream, so that all but the longest pass the end of their documents.
    steps, batch = 8, 120
    whole, end = global_steps(config, ranks=1, steps=steps, batch=batch)
    assert sum(part["position"]["epoch"] > 0 for part in end["parts"].values()) > 6
    for stop in (0, 1, 5, steps):
        first, state = global_steps(config, ranks=before, steps=stop, batch=batch)
        second, same_end = global_steps(config, ranks=after, steps=steps - stop, batch=batch, state=state)
        assert np.array_equal(whole, first + second)
        assert same_end == end


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_other_columns_may_change_their_type_and_come_and_go(tmp_path, model_file, cache, kind):
    import pyarrow as pa
    import pyarrow.parquet as pq

    written = [text(number, 10) for number in range(12)]
    for file, other in enumerate(([1, 2, 3], ["a", "b", "c"], [{"x": 1}, {"x": 2}, {"x": 3}], None)):
        columns = {"text": written[3 * file : 3 * file + 3], **({"id": other} if other else {"new": [[], [1], [2]]})}
        if kind == "parquet":
            pq.write_table(pa.table(columns), tmp_path / f"{file}.parquet")
            continue
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        (tmp_path / f"{file}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = made(tmp_path / f"*.{kind}", model_file, path=kind, streams=1)
    assert list(hf.documents(hf.open_dataset(config, "train"), config)) == written


def test_held_out_documents_are_never_trained_on(config, cache):
    tokenizer = source.tokenizer(config)
    assert tokenizer is not None
    rows = source.open_validation(config, seq_len=8, sequences=10**6, rank=0, ranks=1)
    held_out = tokenizer.decode([int(token) for row, labels in rows for token in row[labels != source.IGNORE]])
    expected = [each for each in TEXTS if is_held_out(each, 0.1)]
    assert expected
    assert all(each.splitlines()[0] in held_out for each in expected)
    trained = "".join(tokenizer.decode(tokens) for tokens in tokens_of_stream(config, 60).values())
    assert not any(each.splitlines()[0] + "\n" in trained for each in expected)
    # Epoch after epoch, everything else is.
    assert all(each.splitlines()[0] + "\n" in trained for each in TEXTS if each not in expected)


def test_named_validation_split(tmp_path, model_file, cache):
    folder = tmp_path / "dataset"
    folder.mkdir()
    for split in ("train", "validation"):
        rows = [{"text": f"{split} {text(number)}"} for number in range(20)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = made(folder, model_file, path=str(folder), data_files=[], validation_split="validation", streams=2)
    config = replace(config, validation_documents=5)
    source.prepare(config, report=silent)
    rows = list(source.open_validation(config, seq_len=16, sequences=10**6, rank=0, ranks=1))
    shown = load(model_file).decode([int(token) for row, _ in rows for token in row])
    assert shown.count("validation document") == 5
    trained = load(model_file).decode(tokens_of_stream(config, 5)[0])
    assert "train document" in trained
    assert "validation" not in trained


def test_trains_a_tokenizer_where_none_is_named(json_lines, cache):
    config, lines = made(json_lines / "*.jsonl", None), []
    source.prepare(config, report=lines.append)
    assert any("training a tokenizer of 330 pieces" in line for line in lines)
    assert any("5 files for 12 streams" in line for line in lines)
    lines.clear()
    source.prepare(config, report=lines.append)
    assert not lines
    # Another number of streams is another order, and the same tokenizer.
    other = changed(config, streams=4)
    source.prepare(other, report=lines.append)
    assert not lines
    assert source.fingerprint(other) != source.fingerprint(config)


def test_fingerprint_is_of_the_content(json_lines, tmp_path, model_file, cache):
    first = source.fingerprint(made(json_lines / "*.jsonl", model_file))
    for file in json_lines.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    moved = made(tmp_path / "*.jsonl", model_file)
    assert source.fingerprint(moved) == first
    with (tmp_path / "4.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    assert source.fingerprint(moved) != first
    hub = HuggingFace(path="owner/name", tokenizer=str(model_file))
    names = [
        source.fingerprint(changed(hub, **change))
        for change in ({}, {"revision": "a"}, {"name": "en"}, {"path": "o/n"})
    ]
    assert len(set(names)) == 4


BAD = {
    "missing field": ({"text_field": "body"}, r"data\.text_field=body: is not a column of json; it has: text"),
    "field of another type": ({"files": '{"text": 5}\n'}, r"data\.text_field=text: holds int, not text"),
    "not JSON": ({"files": '{"text": "a"}\n{"te\n'}, r"data\.path=json: has a part that cannot be read"),
    "no text": ({"files": '{"text": ""}\n'}, r"data\.path=json: has no text in text"),
    "no such split": ({"split": "test"}, r"data\.split=test: is not a split of json"),
    "no such validation split": ({"validation_split": "dev"}, r"data\.validation_split=dev: is not a split of json"),
    "no such file": ({"data_files": ["/nowhere/*.jsonl"]}, r"data\.data_files=/nowhere/\*\.jsonl: matches no file"),
    "no such folder": ({"path": "/nowhere/at/all", "data_files": []}, r"data\.path=/nowhere/at/all: "),
    "pickles": ({"path": "pandas"}, r"data\.path=pandas: reads pickles, which can run code; convert them to parquet"),
    "no network": ({"path": "owner/name", "data_files": []}, r"data\.path=owner/name: cannot be reached .*; check the network"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_datasets_are_named(json_lines, tmp_path, model_file, cache, case):
    changes, message = BAD[case]
    changes = dict(changes)
    files = json_lines / "*.jsonl"
    if content := changes.pop("files", None):
        files = tmp_path / "bad.jsonl"
        files.write_text(str(content))
    with pytest.raises(ConfigError, match=message) as caught:
        source.prepare(made(files, model_file, **changes), report=silent)
    assert "\n" not in str(caught.value)
    assert not [each for each in (cache / "tokens").glob("*") if not each.name.startswith(".")]


def test_a_position_that_no_stream_saves_is_one_error(config):
    config = changed(config, streams=2, prefetch=0)
    _, state = global_steps(config, ranks=1, steps=3)
    places = ("samples", "parts.0", "parts.0.offset", "parts.0.position", "parts.0.position.seen")
    for place, value in itertools.product((*places, "parts.0.position.dataset"), ("x", -1, [])):
        crafted = copy.deepcopy(state)
        *path, last = place.split(".")
        functools.reduce(operator.getitem, path, crafted)[last] = value
        with pytest.raises(DamagedPosition):
            global_steps(config, ranks=1, steps=1, state=crafted)
    for missing in ("samples", "parts", "seq_len", "fingerprint", "streams"):
        with pytest.raises(DamagedPosition, match=rf"^data\.{missing}=null: must "):
            global_steps(config, ranks=1, steps=1, state={key: state[key] for key in state if key != missing})
    # Without its place in the dataset, a stream would begin again with the first document.
    del state["parts"]["0"]["position"]["dataset"]
    with pytest.raises(DamagedPosition, match=r"^data\.parts\.0\.position\.dataset="):
        global_steps(config, ranks=1, steps=1, state=state)


def test_an_offset_beyond_its_document_is_refused_before_the_first_step(config):
    config = changed(config, streams=2, prefetch=0)
    _, state = global_steps(config, ranks=1, steps=3)
    state["parts"]["1"]["offset"] = 2**40
    with pytest.raises(DamagedPosition, match="has an offset that its document does not have"):
        global_steps(config, ranks=1, steps=0, state=state)


class Rows:
    """A dataset of some files, with the methods of `datasets.IterableDataset` that streams call."""

    def __init__(self, files):
        self.files, self.num_shards = files, len(files)
        self.at = 0

    def shard(self, *, num_shards, index, contiguous):
        assert not contiguous
        return Rows(self.files[index::num_shards])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        rows = [row for file in self.files for row in file]
        while self.at < len(rows):
            self.at += 1
            row = rows[self.at - 1]
            if isinstance(row, Exception):
                raise row
            yield {"text": row}


class Letters:
    """A tokenizer whose tokens are code points."""

    bos_id = 1
    eos_id = 2

    def encode(self, text):
        return [ord(letter) for letter in text]


def hub(**given):
    usual = {"path": "owner/name", "streams": 2, "validation_documents": 0, "validation_fraction": 0.0}
    return HuggingFace(**{**usual, **given})


def documents_of(files, number=0, position=None, **given):
    return StreamDocuments(Rows(files), hub(**given), Letters(), number, position)


def texts(found, count):
    return ["".join(map(chr, found.next()[1:-1])) for _ in range(count)]


POSITION = {"epoch": 0, "seen": 0, "kept": 0, "dataset": None}


def test_a_state_of_another_version_is_no_damage():
    with pytest.raises(ConfigError) as caught:
        documents_of([["a"]], 0, POSITION | {"dataset": {"at": "one"}}, streams=1)
    assert not isinstance(caught.value, DamagedPosition)
    assert "datasets does not understand it (TypeError); install the version of datasets" in str(caught.value)


def test_a_stream_without_documents_is_told():
    with pytest.raises(ConfigError) as caught:
        documents_of([["a"], ["", None]], 1, streams=2).next()
    said = "stream 1 has no document: the dataset is too small for so many; try data.streams=1"
    assert str(caught.value) == f"data.streams=2: {said}"


def test_a_part_that_cannot_be_read_is_named_and_an_error_of_the_network_is_not():
    with pytest.raises(ConfigError) as caught:
        texts(documents_of([["a", ValueError("bad\n  bytes")]], streams=1), 2)
    assert str(caught.value) == "data.path=owner/name: has a part that cannot be read (bad bytes); check its files"
    with pytest.raises(ConnectionError):
        texts(documents_of([["a", ConnectionError("gone")]], streams=1), 2)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"path": " \n"}, "data.path=: names no dataset; give one of the hub, such as data.path=allenai/c4"),
        ({"path": "a/b", "streams": 0}, "data.streams=0: must be at least 1; try 24"),
        ({"path": "a/b", "streams": -3}, "data.streams=-3: must be at least 1; try 24"),
        ({"path": "pandas", "data_files": ["a"]}, "data.path=pandas: reads pickles, which can run code"),
        ({"path": "a/b", "validation_fraction": float("nan")}, "data.validation_fraction=nan: must be between 0 and 0.5"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(given, line):
    assert refusal(HuggingFace, **given).startswith(line)
