"""Fixtures of tests of checkpoints: what savers save, and an object store."""

from __future__ import annotations

import pytest

from tests.checkpoint.one_process import ALONE
from tests.checkpoint.targets import trained
from tests.object_store.running import running
from titanlab.checkpoint import Target


@pytest.fixture
def target(tmp_path):
    def make(**given):
        model, optimizer = trained()
        made = {"folder": tmp_path, "world": ALONE, "keep": 2, **given}
        return Target(model=model, optimizer=optimizer, **made)

    return make


@pytest.fixture
def server(monkeypatch):
    """An emulated object store, which answers at once after an error."""
    monkeypatch.setattr("titanlab.checkpoint.storage._WAITS", (0.0, 0.0))
    with running() as server:
        yield server
