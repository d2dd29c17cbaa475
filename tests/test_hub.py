"""Whether the hub answers is known at once."""

import socket
import time

import pytest

from titanlab import hub
from titanlab.cli import main
from titanlab.errors import ConfigError
from titanlab.loopback import listen

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in (*PROXIES, *map(str.upper, PROXIES), "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nobody():
    """An address of this host where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["import", "owner/name"],
        ["download-tokenizer", "owner/name"],
        ["train", "data=hf", "data.path=owner/name", "model.vocab_size=32768", "cluster=cpu", "world=1"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_without_a_network_it_is_said_at_once(arguments, nobody, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", nobody)
    start = time.monotonic()
    assert main(arguments) == 2
    # Half a minute before; what is left is the import of the libraries.
    assert time.monotonic() - start < 10
    (line,) = capsys.readouterr().err.splitlines()
    assert f"owner/name: the hub cannot be reached: {nobody.removeprefix('http://')} does not answer" in line
    assert [each.name for each in tmp_path.iterdir() if each.name not in ("cache", "hf")] == []


def test_what_answers_is_reachable(monkeypatch):
    with listen("127.0.0.1", 0) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.check_reachable("owner/name")


def test_a_proxy_is_what_has_to_answer(monkeypatch, nobody):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    with listen("127.0.0.1", 0) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert hub.is_reachable()
    monkeypatch.setenv("https_proxy", nobody)
    assert not hub.is_reachable()


def test_what_never_answers_is_waited_for_no_longer_than_asked(monkeypatch):
    def never(address, timeout):
        time.sleep(timeout + 1)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    start = time.monotonic()
    assert not hub.is_reachable()
    assert time.monotonic() - start < 3


def test_a_cache_only_library_is_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set; unset it"):
        hub.check_reachable("owner/name")
