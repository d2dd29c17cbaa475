"""The command line of a verb that takes a recipe: flags among overrides, and mistakes in one line."""

import pytest

from titanlab.recipe import read_flags


def test_without_arguments_a_run_starts():
    flags = read_flags([])
    assert (flags.overrides, flags.flags, set(flags.values.values())) == ([], [], {None})
    assert (flags.answer, flags.options.multirun) == (None, False)


@pytest.mark.parametrize(
    ("arguments", "overrides", "flags"),
    [
        (["seed=1", "-m"], ["seed=1"], ["-m"]),
        (["a=1", "--cfg", "job", "b=2"], ["a=1", "b=2"], ["--cfg", "job"]),
        (["seed=1", "--config-dir", "x", "seed=1"], ["seed=1", "seed=1"], ["--config-dir", "x"]),
        (["--", "seed=1"], ["seed=1"], ["--"]),
        # What is no override is Hydra's to name.
        (["seed", "~training.steps", "+a=1", "++b=2"], ["seed", "~training.steps", "+a=1", "++b=2"], []),
    ],
)
def test_flags_may_stand_anywhere(arguments, overrides, flags):
    found = read_flags(arguments)
    assert (found.overrides, found.flags) == (overrides, flags)


def test_the_last_of_two_values_counts():
    found = read_flags(["--config-name", "a", "--config-name=b", "-cd", "there", "--config-path=x"])
    assert found.values == {"--config-name": "b", "--config-dir": "there", "--config-path": "x"}


@pytest.mark.parametrize(
    ("arguments", "starts", "multirun"),
    [
        (["-h", "seed=1"], False, False),
        (["--hydra-help"], False, False),
        (["--cfg", "job", "--resolve", "--package", "model"], False, False),
        (["--info"], False, False),
        (["--shell-completion", "query=bash"], False, False),
        (["-m", "seed=1,2"], True, True),
        (["--multirun", "--multirun"], True, True),
        (["--run"], True, False),
    ],
)
def test_what_the_flags_ask_for(arguments, starts, multirun):
    found = read_flags(arguments)
    assert (found.answer is None, found.options.multirun) == (starts, multirun)


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("runs=~/a", "runs=/home/ada/a"),
        ("runs=~", "runs=/home/ada"),
        ("runs=~bob/a", "runs=~bob/a"),
        ("runs=a~/b", "runs=a~/b"),
        ("runs=", "runs="),
        ("~runs", "~runs"),
    ],
)
def test_the_home_folder_is_put_in(monkeypatch, override, read):
    monkeypatch.setenv("HOME", "/home/ada")
    assert read_flags([override]).overrides == [read]
