"""What tests of the verbs that prove and rehearse share: ranks that are none, and calls with their output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from titanlab.prove import RunFailed, TrainingTrace
from titanlab.prove.forked import Ended
from titanlab.records import Outcome, OutcomeKind, RunFolder

TWO = ("parallelism=fsdp", "world=2")


@pytest.fixture
def ranks(monkeypatch):
    """Stands in for ranks, and keeps the recipes: every trace is the same, and recipes whose names have a word fail."""
    trained, failing = [], set()

    def ended(recipe):
        trained.append(recipe)
        bad = any(word in recipe.name for word in failing)
        outcome = Outcome(kind=OutcomeKind.CRASH, rank=1, cause="LookupError: a planted fault")
        run = RunFolder(Path(recipe.runs) / "reduced" / recipe.name)
        run.path.mkdir(parents=True)
        return Ended(run=run, attempt=1, outcome=outcome if bad else Outcome(kind=OutcomeKind.DONE), seconds=1.0)

    class Trainer:
        failed = False

        def __call__(self, recipe):
            found = ended(recipe)
            if found.outcome.kind is not OutcomeKind.DONE:
                self.failed = True
                raise RunFailed(found)
            tensors = {"a": torch.ones(2)}
            return [TrainingTrace(losses=[1.0], grad_norms=[1.0], gradients=tensors, parameters=tensors)]

    monkeypatch.setattr("titanlab.cli.proofs.Trainer", Trainer)
    monkeypatch.setattr("titanlab.cli.proofs.train_in_ranks", ended)
    monkeypatch.setattr("titanlab.cli.proofs.prepare", lambda: None)
    return trained, failing


@pytest.fixture
def says(here, say):
    return say


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The system's folder of temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def call_for_real(here):
    """What a call prints as JSON, in a process of its own, which imports torch once and forks."""

    def call(*arguments):
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "titanlab", *arguments, "+recipe=quickstart", *TWO, "--json"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return call
