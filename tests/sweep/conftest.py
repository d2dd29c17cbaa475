"""What tests of submitting share: a Slurm that is none, and nobody who listens."""

import pytest

from tests.sweep.fake_slurm.cluster import FakeSlurm


def quiet(text: str) -> None:
    """Is told what takes long, and tells nobody."""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A fake Slurm, whose commands are on PATH."""
    fake = FakeSlurm(tmp_path / "slurm")
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    return fake
