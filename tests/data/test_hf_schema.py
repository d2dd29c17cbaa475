"""The config of a Hugging Face dataset: what a person may write, and what it becomes."""

from __future__ import annotations

import os

import pytest

from titanlab.data.schema import HuggingFace
from titanlab.errors import ConfigError


def refusal(**given):
    with pytest.raises(ConfigError) as caught:
        HuggingFace(**given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "data.path=: names no dataset; give one of the hub, such as data.path=allenai/c4"),
        ({"path": " \n"}, "data.path=: names no dataset; give one of the hub, such as data.path=allenai/c4"),
        ({"path": "a/b", "streams": 0}, "data.streams=0: must be at least 1; try 24"),
        ({"path": "a/b", "streams": -3}, "data.streams=-3: must be at least 1; try 24"),
        ({"path": "a/b", "validation_documents": -1}, "data.validation_documents=-1: must be at least 0; try 1000"),
        ({"path": "a/b", "prefetch": -1}, "data.prefetch=-1: must be at least 0; try 2"),
        ({"path": "a/b", "split": ""}, "data.split=: must not be empty; try train"),
        ({"path": "a/b", "text_field": ""}, "data.text_field=: must not be empty; try text"),
        ({"path": "pandas"}, "data.path=pandas: reads pickles, which can run code; convert them to parquet"),
        ({"path": "pandas", "data_files": ["a"]}, "data.path=pandas: reads pickles, which can run code"),
        ({"path": "json"}, "data.data_files=[]: path=json needs files; try 'data.data_files=[corpus/*.jsonl]'"),
        ({"path": "a/b", "vocab_size": 3}, "data.vocab_size=3: must be at least "),
        ({"path": "a/b", "validation_fraction": float("nan")}, "data.validation_fraction=nan: must be between 0 and 0.5"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(given, line):
    assert refusal(**given).startswith(line)


def test_nothing_may_be_held_out_or_prepared_ahead():
    data = HuggingFace(path="a/b", validation_documents=0, prefetch=0, streams=1)
    assert (data.validation_documents, data.prefetch) == (0, 0)


def test_files_of_this_machine_are_found_from_another_folder_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    files = ["corpus/*.jsonl", "~/x.json", "/a/../b.json", "hf://datasets/a/b.json", "https://x/y.json.gz"]
    made = HuggingFace(path="json", data_files=files).data_files
    assert made == (f"{tmp_path}/corpus/*.jsonl", "/home/me/x.json", "/b.json", *files[3:])
    assert HuggingFace(path="json", data_files=made).data_files == made


def test_files_of_a_dataset_are_names_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert HuggingFace(path="allenai/c4", data_files=["en/*.gz"]).data_files == ("en/*.gz",)


def test_a_folder_is_a_folder_from_everywhere_and_a_name_of_the_hub_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("mine/set")
    (tmp_path / "file").write_text("")
    assert HuggingFace(path="mine/set").path == f"{tmp_path}/mine/set"
    assert HuggingFace(path="allenai/c4").path == "allenai/c4"
    assert HuggingFace(path="file").path == "file"


def test_a_folder_of_a_format_s_name_does_not_hide_the_format(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("json")
    assert HuggingFace(path="json", data_files=["a.json"]).path == "json"


def test_a_dataset_of_the_hub_has_no_files():
    assert HuggingFace(path="a/b").data_files == ()
