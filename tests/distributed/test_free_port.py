"""Ports that the launchers choose for rank 0."""

import socket

import pytest

from titanlab.distributed import free_port
from titanlab.distributed import ranks as module


@pytest.fixture
def ports(tmp_path, monkeypatch):
    """Sets the range of ports that the kernel gives to outgoing connections."""
    file = tmp_path / "range"
    monkeypatch.setattr(module, "_RANGE_FILE", file)
    return file.write_text


def test_an_outgoing_connection_cannot_take_the_port(ports):
    ports("32768\t60999\n")
    assert all(20_000 <= free_port() < 32_768 for _ in range(50))


def test_a_port_in_use_is_not_chosen(ports):
    with socket.socket() as taken:
        taken.bind(("", free_port()))
        port = taken.getsockname()[1]
        taken.listen()
        ports("20002 60999")
        chosen = {free_port() for _ in range(20)}
        assert port not in chosen
        with socket.socket() as first, socket.socket() as second:
            for probe, number in ((first, 20_000), (second, 20_001)):
                probe.bind(("", number))
            assert free_port() not in {20_000, 20_001, 0}


@pytest.mark.parametrize("text", ["1024 65535", "", "none"])
def test_a_host_without_ports_below_that_range_has_a_port_too(ports, text):
    ports(text)
    with socket.socket() as probe:
        probe.bind(("", free_port()))
