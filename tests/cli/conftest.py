"""The command line as a person types it, in this process, with everything watched that it would start."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tiny
from titanlab.cli import main
from titanlab.distributed import Host
from titanlab.recipe import Recipe, to_mapping
from titanlab.records import Outcome, OutcomeKind, create_run, identify

LINE = re.compile(r"error: (?P<key>[^=\n]+)=(?P<value>.*?): (?P<rule>.+?); (?P<cure>.+)\n")


@dataclass(frozen=True)
class Said:
    """What a call came to."""

    code: int
    out: str
    err: str
    started: list[Recipe]

    @property
    def refusal(self) -> re.Match[str]:
        """The one line with which bad input is refused, nothing having started."""
        found = LINE.fullmatch(self.err)
        assert found, f"not one line of key, value, rule and cure: {self.err!r}"
        assert (self.code, self.started) == (2, [])
        # What was done on the way (reading, preparing) is told on standard output.
        assert "error" not in self.out
        return found


CommandLine = Callable[..., Said]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Hydra may give the root logger a handler that writes to what is standard output at the time."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def command(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """`command("train seed=1", RANK="0")`: the verb's real code on a host without a GPU, up to the start of ranks."""
    started: list[Recipe] = []

    def execute(ready, console):
        started.append(ready.recipe)
        return Outcome(kind=OutcomeKind.DONE)

    def continue_run(run, recipe, ranks, console, *, checkpoint=None):
        started.append(recipe)
        return Outcome(kind=OutcomeKind.DONE)

    def submit(study, report, *, force):
        started.extend(planned.recipe for planned in study.planned)
        decisions = [SimpleNamespace(run=planned.recipe.name) for planned in study.planned]
        return SimpleNamespace(folder=None, decisions=decisions, submissions=())

    def follow(folder):
        return [{"run": recipe.name, "state": "ended", "outcome": "done"} for recipe in started]

    monkeypatch.setattr("titanlab.cli.sweep.submit", submit)
    monkeypatch.setattr("titanlab.cli.sweep._report", lambda *given, **named: None)
    monkeypatch.setattr("titanlab.cli.sweep.follow", follow)
    # First the module that imports `execute`, which must not keep the one put in its place.
    monkeypatch.setattr("titanlab.cli.resume.continue_run", continue_run)
    monkeypatch.setattr("titanlab.launch.execute.execute", execute)
    for module in ("titanlab.launch.execute", "titanlab.cli.weights", "titanlab.sweep.plan"):
        monkeypatch.setattr(f"{module}.this_host", lambda: Host(accelerator="cpu", device="cpu", count=2))

    def call(line: str | list[str], **environ: str) -> Said:
        started.clear()
        capsys.readouterr()
        before = sorted(os.listdir(here))
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            code = main(shlex.split(line) if isinstance(line, str) else line)
        assert sorted(os.listdir(here)) == before, "something was written"
        return Said(code, *capsys.readouterr(), list(started))

    return call


@pytest.fixture
def say(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`say("status", folder)`: exit code, standard output, standard error. A file about one verb has it as `VERB`."""
    verb = [request.module.VERB] if hasattr(request.module, "VERB") else []

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*verb, *map(str, words)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def shown(say: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Standard output of a call that succeeds without a word on standard error."""

    def call(*words: object) -> str:
        code, out, err = say(*words)
        assert (code, err) == (0, "")
        return out

    return call


@pytest.fixture
def saved_run(tmp_path: Path) -> Path:
    """A run that has saved a checkpoint and was stopped; no data with text."""
    made = tiny.recipe(tmp_path / "runs", shard=2)
    identity = identify(made, data="tiny", hardware="cpu")
    run = create_run(made.runs, name="toy", identity=identity, config=to_mapping(made))
    shapes = {name: list(shape) for name, shape in made.model.account().parameters.items()}
    tiny.write_checkpoint(run.checkpoints / "step-00000003", {"step": 3, "parameters": shapes})
    return run.path
