"""A fixture of tests of savers: what they save."""

from __future__ import annotations

import pytest

from tests.checkpoint.savers.targets import ALONE, trained
from titanlab.checkpoint.contract import Target


@pytest.fixture
def target(tmp_path):
    def make(**given):
        model, optimizer = trained()
        made = {"folder": tmp_path, "world": ALONE, "keep": 2, **given}
        return Target(model=model, optimizer=optimizer, **made)

    return make
