import pytest

from tests.object_store.running import running


@pytest.fixture
def server(monkeypatch):
    """An emulated object store, which answers at once after an error."""
    monkeypatch.setattr("titanlab.checkpoint.objects._WAITS", (0.0, 0.0))
    with running() as server:
        yield server
