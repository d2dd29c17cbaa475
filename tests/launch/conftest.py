"""What tests of launch=local share."""

import pytest

from tests.launch.command import Command


@pytest.fixture
def command(tmp_path):
    """`command.run("training.steps=6")`: `titanlab train` in a folder of this test's own."""
    return Command(tmp_path)
