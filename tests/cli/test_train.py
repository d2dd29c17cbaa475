"""The verb that trains, apart from the training."""

from types import SimpleNamespace

import pytest

from titanlab.cli import train, verbs
from titanlab.outcome import Outcome, OutcomeKind


@pytest.mark.parametrize(
    ("ends", "started", "code"),
    [
        (["done", "done", "done"], 3, 0),
        (["done", "nan", "done"], 3, 72),
        (["crash", "done", "oom"], 3, 1),
        (["done", "cancelled", "done"], 2, 130),
        (["preempted", "done", "done"], 1, 75),
    ],
)
def test_several_runs_go_on_after_a_failure_and_not_after_a_stop(monkeypatch, ends, started, code):
    runs = []

    def execute(run, console):
        runs.append(run)
        return Outcome(kind=OutcomeKind(run))

    monkeypatch.setattr(train, "compose", lambda arguments: ends)
    monkeypatch.setattr(train, "prepare", lambda recipes, report: recipes)
    monkeypatch.setattr(train, "execute", execute)
    assert train.main([]) == code
    assert runs == ends[:started]


def test_ctrl_c_before_anything_starts_is_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs.importlib, "import_module", lambda name: SimpleNamespace(main=interrupted))
    assert verbs.main(["train"]) == 130
    assert capsys.readouterr().err == "error: interrupted; nothing was started\n"
