"""The loopback of this host: its addresses and its interface, who can listen there, and which ranks are on one host."""

import socket
from dataclasses import replace

import pytest

from titanlab.distributed import ALONE, loopback_interface, ranks
from titanlab.distributed.ranks import is_loopback, is_one_host, listen, loopback_address


def test_names_and_addresses_of_the_loopback_are_known():
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "0.0.0.0", "no.such.host.invalid", "")))
    assert loopback_interface() in ("lo", "lo0")


def test_several_hosts_are_not_taken_for_one():
    here = replace(ALONE, world=2, local_world=2, started_by="torchrun", address="10.0.0.1")
    # By hand, without LOCAL_WORLD_SIZE: the number of ranks here is a guess.
    assert not is_one_host(here, {})
    assert is_one_host(here, {"TORCHELASTIC_RUN_ID": "7"})
    assert not is_one_host(replace(here, local_world=1), {"TORCHELASTIC_RUN_ID": "7"})
    assert is_one_host(replace(here, is_counted=True), {})
    assert is_one_host(replace(here, address="127.0.0.1"), {})


def test_without_ipv4_the_loopback_is_ipv6s(monkeypatch):
    def listen_as_without(address, port):
        if ":" not in address:
            raise OSError("no such family")
        return socket.socket()

    monkeypatch.setattr(ranks, "listen", listen_as_without)
    assert loopback_address() == "::1"


def test_a_port_that_is_taken_is_named():
    with listen("127.0.0.1", 0) as first, pytest.raises(OSError, match=rf"127.0.0.1:{first.getsockname()[1]} \("):
        listen("127.0.0.1", first.getsockname()[1])


def test_a_host_without_loopback_has_no_address_and_no_interface(monkeypatch):
    def refused(*given):
        raise OSError("no such family")

    monkeypatch.setattr(ranks, "listen", refused)
    assert loopback_address() is None
    monkeypatch.setattr(ranks.socket, "if_nameindex", lambda: [(1, "eth0")])
    assert loopback_interface() is None
    monkeypatch.setattr(ranks.socket, "if_nameindex", lambda: [(2, "lo0"), (1, "eth0")])
    assert loopback_interface() == "lo0"
    monkeypatch.setattr(ranks.socket, "if_nameindex", refused)
    assert loopback_interface() is None


def test_a_name_with_an_address_elsewhere_is_no_loopback(monkeypatch):
    found = [(None, None, None, "", ("127.0.0.1", 0)), (None, None, None, "", ("10.0.0.1", 0))]
    monkeypatch.setattr(ranks.socket, "getaddrinfo", lambda address, port: found)
    assert not is_loopback("both")
    monkeypatch.setattr(ranks.socket, "getaddrinfo", lambda address, port: found[:1])
    assert is_loopback("one")
    monkeypatch.setattr(ranks.socket, "getaddrinfo", lambda address, port: [])
    assert not is_loopback("none")


def test_a_listener_takes_connections_on_its_address_only():
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        with socket.create_connection(listener.getsockname()):
            pass
