"""Environments of then and now: every difference in one short line, and a command of packages that is safe to type."""

from __future__ import annotations

import pytest

from titanlab.sweep import config_differences, differences, pip_line


def of(**sections):
    return {"packages": {"torch": "2.11.0", "numpy": "2.0"}, "python": {"version": "3.11.7"}, **sections}


def test_equal_environments_do_not_differ():
    assert differences(of(), of()) == []
    assert differences({}, {}) == []
    assert pip_line(of(), of()) is None


def test_what_was_recorded_is_compared_and_what_is_new_is_not():
    then = of(host={"name": "a", "cpu": "x", "other": 1}, platform={"system": "Linux"})
    now = of(host={"name": "b", "cpu": "x", "memory_gib": 5}, devices={"count": 8})
    assert differences(then, now) == [("platform.system", "Linux", "-"), ("host.name", "a", "b")]


def test_packages_and_variables_differ_in_both_directions():
    then = of(environment={"A": "1", "SLURM_JOB_ID": "5", "LOCAL_RANK": "0", "RANK": "1", "MASTER_PORT": "7"})
    now = of(packages={"torch": "2.12.0", "wheel": "1"}, environment={"B": "2"})
    assert differences(then, now) == [
        ("numpy", "2.0", "-"),
        ("torch", "2.11.0", "2.12.0"),
        ("wheel", "-", "1"),
        ("A", "1", "-"),
        ("B", "-", "2"),
    ]


@pytest.mark.parametrize("section", [None, 5, "x", []])
def test_a_damaged_section_is_empty(section):
    broken = dict.fromkeys(("packages", "python", "environment", "host"), section)
    assert differences(broken, broken) == []
    assert pip_line(broken, of()) is None


def test_texts_are_one_short_line():
    long = "x" * 100
    found = differences({"environment": {"n" * 100: f"a\n  b\t{long}"}}, {})
    assert found == [("n" * 60, f"a b {long}"[:59] + "…", "-")]


def test_the_command_installs_what_differs():
    then = of(packages={"torch": "2.11.0+cu128", "numpy": "2.0", "a-b_c.d": "1!2.0.post1"})
    now = of(packages={"numpy": "2.0", "torch": "2.12.0"})
    assert pip_line(then, now) == "pip install a-b_c.d==1!2.0.post1 torch==2.11.0+cu128"


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("--index-url", "1"),
        ("", "1"),
        ("a", "1; rm -r"),
        ("a", "$(x)"),
        ("a", None),
        ("a", "1\n"),
        ("a" * 101, "1"),
    ],
)
def test_what_a_shell_or_pip_could_take_for_more_is_left_out(name, version):
    assert pip_line({"packages": {name: version}}, {}) is None


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, [("a.c", "2", "3")]),
        ({"a": None}, {"b": False}, [("a", "null", "–"), ("b", "–", "false")]),
        # An empty mapping is a value; a number and its text are written alike.
        ({"a": {}, "c": 1}, {"a": {"b": 1}, "c": "1"}, [("a", "{}", "–"), ("a.b", "–", "1")]),
        # The place of a run does not count.
        (
            {"runs": "a", "name": "n", "data": {"name": "x"}},
            {"runs": "b", "data": {"name": "y"}},
            [("data.name", "x", "y")],
        ),
    ],
)
def test_values_of_configs_that_differ_are_named_by_their_keys(then, now, expected):
    assert config_differences(then, now) == expected
