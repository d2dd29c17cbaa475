"""What tests of submitting share: a Slurm that is none, and nobody who listens."""

import functools

import pytest

from tests.sweep.fake_slurm.cluster import FakeSlurm
from tests.sweep.made import Made
from tests.sweep.studies import SLURM, seeds, study
from titanlab.records import Outcome, OutcomeKind
from titanlab.sweep import sweep_folder
from titanlab.sweep.submit import submit

ENDS = [OutcomeKind.DONE, OutcomeKind.HANG, OutcomeKind.OOM, None, None]
STATES = ["COMPLETED", "FAILED", "FAILED", "RUNNING", "PENDING"]


def quiet(text: str) -> None:
    """Is told what takes long, and tells nobody."""


@pytest.fixture(scope="session")
def small_package(tmp_path_factory):
    """A package of one file, of which a snapshot takes no time: the real one has a thousand files."""
    package = tmp_path_factory.mktemp("clone") / "titanlab"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0"\n')
    return package


@pytest.fixture
def slurm(tmp_path, monkeypatch, small_package):
    """A fake Slurm, whose commands are on PATH. It starts no job, so that jobs get a snapshot of a small package."""
    fake = FakeSlurm(tmp_path / "slurm")
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("titanlab.launch.slurm.command.run_command", fake.answer)
    monkeypatch.setattr(
        sweep_folder, "take_snapshot", functools.partial(sweep_folder.take_snapshot, package=small_package)
    )
    return fake


@pytest.fixture
def whole_snapshots(slurm, monkeypatch):
    """After `slurm`: snapshots are again those of the package that runs."""
    monkeypatch.setattr(sweep_folder, "take_snapshot", sweep_folder.take_snapshot.func)


@pytest.fixture
def made(tmp_path):
    """A sweep without runs, to be filled."""
    return Made(tmp_path / "runs")


@pytest.fixture
def sweep(slurm, tmp_path):
    """Job 101 with five runs: done, hung, out of memory, running, waiting; the first was made by the code that is here."""
    wanted = study(tmp_path / "runs", seeds(5), launch=SLURM)
    folder = submit(wanted, quiet).folder
    (submission,) = folder.submissions()
    for index, (kind, state) in enumerate(zip(ENDS, STATES, strict=True)):
        run = folder.run(submission.runs[index])
        if state != "PENDING":
            code = sweep_folder.present_code() if index == 0 else "other"
            run.begin_attempt(run.config(), {"code": {"fingerprint": code}})
            attempt = run.attempt_folder(1) / "job.json"
            attempt.write_text(f'{{"token": "{submission.token}", "index": {index}}}')
        if kind is not None:
            run.write_result(Outcome(kind=kind, attempt=1, step=3))
        slurm.put(101, state, index)
    return folder


def names(folder):
    """The names of the runs of a sweep's first submission."""
    return folder.submissions()[0].runs
