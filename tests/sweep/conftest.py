"""What tests of submitting share: a Slurm that is none, and nobody who listens."""

import functools

import pytest

from tests.sweep.fake_slurm.cluster import FakeSlurm
from titanlab.sweep import snapshot


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
    monkeypatch.setattr(snapshot, "take", functools.partial(snapshot.take, package=small_package))
    return fake


@pytest.fixture
def whole_snapshots(slurm, monkeypatch):
    """After `slurm`: snapshots are again those of the package that runs."""
    monkeypatch.setattr(snapshot, "take", snapshot.take.func)
