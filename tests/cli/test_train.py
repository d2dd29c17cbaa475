"""The verb that trains, apart from the training."""

import pytest

from titanlab.cli import sweep
from titanlab.cli.verbs import call
from titanlab.launch import execute
from titanlab.records import Outcome, OutcomeKind


@pytest.mark.parametrize(
    ("arguments", "waits"),
    [
        ("-m seed=0,1", True),
        ("seed=0 --multirun", True),
        ("+sweeps=quickstart_layouts", True),
        # On this host the command would be over before the first run is.
        ("launch=slurm cluster=cpu", False),
    ],
)
def test_what_is_more_than_one_run_here_is_submitted(monkeypatch, arguments, waits):
    given = []
    monkeypatch.setattr(sweep, "run_study", lambda rest, **named: given.append((rest, named)) or 7)
    assert call(["train", "data=synthetic", *arguments.split()]) == 7
    ((rest, named),) = given
    assert rest == ["data=synthetic", *arguments.split()]
    assert {named.get(name, False) for name in ("wait", "whole")} == {waits}
    assert not named["dry_run"]
    assert "force" not in named


@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}])
def test_one_run_is_executed_here(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(execute, "execute", lambda run, console: Outcome(kind=OutcomeKind.NAN))
    monkeypatch.setattr("titanlab.launch.prepare", lambda recipes, report: recipes)
    monkeypatch.setattr(sweep, "run_study", lambda *given, **named: pytest.fail("submitted"))
    # A rank that somebody else started has been launched already.
    launch = ["launch=slurm", "cluster=cpu"] if environ else []
    assert call(["train", "data=synthetic", *launch]) == OutcomeKind.NAN.exit_code


@pytest.mark.parametrize(
    ("arguments", "runs"), [("-m seed=0,1 --dry-run", 2), ("-n", 1), ("launch=slurm cluster=cpu -n", 1)]
)
def test_a_dry_run_shows_what_would_be_started(command, arguments, runs):
    said = command(f"train data=synthetic {arguments}")
    assert (said.code, said.started) == (0, [])
    lines = said.out.splitlines()
    assert lines[-1] == "nothing was submitted (--dry-run)"
    assert f"{runs} to submit" in lines
