"""What tests of precisions share."""

import pytest

from tests.precision.curves import Curves


@pytest.fixture(scope="session")
def curves(pool, tmp_path_factory):
    """A hundred losses on real text, by precision."""
    return Curves(pool, tmp_path_factory.mktemp("curves"))
