"""What tests of reports share."""

import pytest

from tests.sweep.made import Made


@pytest.fixture
def made(tmp_path):
    """A sweep without runs, to be filled."""
    return Made(tmp_path / "runs")
