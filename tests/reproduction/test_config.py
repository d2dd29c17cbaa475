"""Configs of then and now: everything that differs but the place of the run, and the file that is written."""

from __future__ import annotations

import pytest

from titanlab.sweep import config_differences, write_config


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({}, {}, []),
        ({"a": 1}, {"a": 1}, []),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, [("a.c", "2", "3")]),
        ({"a": 1}, {"b": 2}, [("a", "1", "–"), ("b", "–", "2")]),
        ({"a": None}, {"a": False}, [("a", "null", "false")]),
        # An empty mapping is a value.
        ({"a": {}}, {"a": {"b": 1}}, [("a", "{}", "–"), ("a.b", "–", "1")]),
        ({"a": {"b": {"c": [1]}}}, {"a": {"b": {"c": [2]}}}, [("a.b.c", "[1]", "[2]")]),
        # A number and its text are written alike.
        ({"a": 1}, {"a": "1"}, []),
    ],
)
def test_values_that_differ_are_named_by_their_keys(then, now, expected):
    assert config_differences(then, now) == expected


def test_the_place_of_a_run_does_not_count():
    then = {"runs": "a", "sweep": "s", "name": "n", "data": {"name": "x"}}
    now = {"runs": "b", "sweep": "t", "name": "m", "data": {"name": "y"}}
    assert config_differences(then, now) == [("data.name", "x", "y")]


def test_the_config_is_written_into_a_new_folder(tmp_path):
    write_config(tmp_path / "a" / "b", "é: 1\n")
    assert (tmp_path / "a" / "b" / "run.yaml").read_bytes() == "é: 1\n".encode()
