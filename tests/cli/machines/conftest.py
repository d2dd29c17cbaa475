"""What tests of `titanlab plan --calibrate` and `--measure` share."""

from __future__ import annotations

import pytest

from tests.sweep.made import SUMMARY, Made, begin, end
from titanlab.cli import main
from titanlab.costs import meter


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """`plan("--measure")`: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["plan", *arguments])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def sweep(tmp_path):
    """A sweep of six recipes that are done, and one that waits."""
    made = Made(tmp_path / "runs", "layouts")
    for number, layout in enumerate(
        ({}, {"replicate": 2}, {"shard": 2}, {"tensor": 2}, {"context": 2}, {"seq_len": 64})
    ):
        run = made.run(f"r{number}", **layout)
        begin(run)
        end(run, metrics={**SUMMARY, meter.STEP_SECONDS: 0.02 + 0.01 * number})
    made.run("waits", seed=9)
    return made
