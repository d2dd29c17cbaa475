"""Whether the hub answers is known at once."""

import contextlib
import http.server
import socket
import threading
import time

import pytest

from titanlab.cli import main
from titanlab.distributed.ranks import listen
from titanlab.errors import ConfigError
from titanlab.system import hub

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
    assert time.monotonic() - start < 25
    (line,) = capsys.readouterr().err.splitlines()
    assert f"owner/name: the hub cannot be reached: {nobody.removeprefix('http://')} does not answer" in line
    assert [each.name for each in tmp_path.iterdir() if each.name not in ("cache", "hf")] == []


@contextlib.contextmanager
def answering(status):
    """The address of what answers each request with a status, and what it was asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:9/")
            self.end_headers()

        def do_CONNECT(self):
            self.do_HEAD()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [200, 302, 404, 405, 500])
def test_what_answers_is_reachable(status, monkeypatch):
    with answering(status) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", f"{address}/mirror")
        hub.check_reachable("owner/name")
    assert asked == ["/mirror"]


def test_what_accepts_and_says_nothing_is_not(monkeypatch):
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.3)
    with listen("127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        with pytest.raises(ConfigError, match=f"cannot be reached: {address} does not answer within 0.3 s"):
            hub.check_reachable("owner/name")


@pytest.mark.parametrize("name", ["https_proxy", "all_proxy"])
def test_a_proxy_is_what_has_to_answer(name, monkeypatch, nobody):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    # It lets nobody through, which the library tells.
    with answering(403) as (address, asked):
        monkeypatch.setenv(name, address)
        assert hub.silence() is None
    assert asked == ["hub.invalid:443"]
    monkeypatch.setenv(name, nobody)
    assert hub.silence() is not None


def test_a_hub_that_is_not_to_be_reached_through_the_proxy(monkeypatch, nobody):
    monkeypatch.setenv("http_proxy", nobody)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with answering(200) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert hub.silence() is None
    assert asked


def test_what_never_answers_is_waited_for_no_longer_than_asked(monkeypatch):
    def never(address, timeout, source=None):
        time.sleep(timeout + 20)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    start = time.monotonic()
    assert hub.silence() is not None
    assert time.monotonic() - start < 15


def test_a_refused_connection_is_not_waited_for(monkeypatch, nobody):
    monkeypatch.setenv("HF_ENDPOINT", nobody)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "60")
    start = time.monotonic()
    assert hub.silence() == 60
    assert time.monotonic() - start < 30


def test_a_cache_only_library_is_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set; unset it"):
        hub.check_reachable("owner/name")


@pytest.mark.parametrize("address", ["", "huggingface.co", "ftp://x", "https://", "http://["])
def test_an_endpoint_that_is_no_address_is_named(address, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(ConfigError, match=r"^HF_ENDPOINT=.*: is no address of a hub; leave it out, or try https://"):
        hub.check_reachable("owner/name")
