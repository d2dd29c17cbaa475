"""The command line of a verb that takes a recipe: flags among overrides, and mistakes in one line."""

import pytest

from titanlab.errors import ConfigError
from titanlab.recipe import read_flags


def test_without_arguments_a_run_starts():
    flags = read_flags([])
    assert (flags.overrides, flags.flags, set(flags.values.values())) == ([], [], {None})
    assert (flags.starts, flags.helps, flags.multirun) == (True, False, False)


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
    ("arguments", "starts", "helps", "multirun"),
    [
        (["--help"], False, True, False),
        (["-h", "seed=1"], False, True, False),
        (["--hydra-help"], False, False, False),
        (["--cfg", "job", "--resolve", "--package", "model"], False, False, False),
        (["--info"], False, False, False),
        (["--shell-completion", "query=bash"], False, False, False),
        (["-m", "seed=1,2"], True, False, True),
        (["--multirun", "--multirun"], True, False, True),
        (["--run"], True, False, False),
    ],
)
def test_what_the_flags_ask_for(arguments, starts, helps, multirun):
    found = read_flags(arguments)
    assert (found.starts, found.helps, found.multirun) == (starts, helps, multirun)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        # Hydra's script took the completion of all verbs away.
        (
            ["-sc", "install=bash"],
            '--shell-completion=install=bash: would replace the completion of all verbs; try eval "$(titanlab completion bash)"',
        ),
        (["--nope"], "arguments=--nope: is no flag of this verb; see `titanlab train --help`"),
        (["-x", "seed=1", "--y"], "arguments=-x --y: is no flag of this verb; see `titanlab train --help`"),
        # An abbreviation would change its meaning with a new flag.
        (["--conf", "x"], "arguments=--conf: is no flag of this verb; see `titanlab train --help`"),
        (["--config-dir"], "--config-dir=: expected one argument; see `titanlab train --help`"),
        (["--cfg", "-m"], "--cfg=-m: expected one argument; see `titanlab train --help`"),
        (["--resolve"], "arguments=--resolve: goes with --cfg; try --cfg job --resolve"),
        (["--package", "x"], "--package=x: goes with --cfg; try --cfg job --package x"),
        (["-m", "--run"], "arguments=-m --run: --run and --multirun do not go together; choose one of them"),
        (["-m", "--info"], "arguments=-m --info: --multirun and --info do not go together; choose one of them"),
        (
            ["--experimental-rerun", "x"],
            "--experimental-rerun=x: a run is not repeated from a pickle; try titanlab resume RUN",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, error):
    with pytest.raises(ConfigError) as raised:
        read_flags(arguments)
    assert str(raised.value) == error


@pytest.mark.parametrize("arguments", [["--cfg", "zzz"], ["--cfg=zzz"], ["seed=1", "--cfg", "zzz"]])
def test_a_value_that_a_flag_does_not_have_is_named(arguments):
    with pytest.raises(ConfigError, match=r"^--cfg=zzz: invalid choice: 'zzz' \(choose from .*job.*\)") as raised:
        read_flags(arguments)
    assert "\n" not in str(raised.value)


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


@pytest.mark.parametrize(
    ("override", "key"),
    [("+hydra.callbacks.x._target_=os.system", "hydra.callbacks.x._target_"), ("hydra.run.dir=x", "hydra.run.dir")],
)
def test_overrides_that_no_config_may_have_are_refused(override, key):
    with pytest.raises(ConfigError) as raised:
        read_flags(["seed=1", override])
    assert raised.value.key == key
