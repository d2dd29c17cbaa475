"""Slurm's commands, whose answers a test writes."""

import pytest

from tests.launch.slurm.printed import Answers


@pytest.fixture
def slurm(monkeypatch):
    """What the commands print; no program is started."""
    return Answers(monkeypatch)
