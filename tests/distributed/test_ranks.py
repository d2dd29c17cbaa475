"""The rank of a process, by torchrun's variables; ports and the loopback of this host."""

import socket
from dataclasses import replace

import pytest

from titanlab.distributed import ALONE, free_port, joined, loopback_interface, ranks
from titanlab.distributed.ranks import is_loopback, is_one_host, listen
from titanlab.errors import ConfigError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500",
}  # fmt: skip


def test_torchrun_is_joined_and_round_trips_to_the_variables_torch_reads():
    found = joined(TORCHRUN)
    assert (found.rank, found.world, found.local_rank, found.local_world) == (5, 8, 1, 4)
    assert found.environment() == TORCHRUN


def test_a_process_on_its_own_joins_nothing():
    assert joined({}) is None


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"RANK": "x"}, "RANK"),
        ({"RANK": "8"}, "RANK"),
        ({"MASTER_PORT": None}, "MASTER_PORT"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK"),
    ],
)
def test_a_broken_environment_is_named(change, key):
    environ = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as refused:
        joined(environ)
    assert refused.value.key == key


@pytest.fixture
def ports(tmp_path, monkeypatch):
    """Sets the range of ports that the kernel gives to outgoing connections."""
    file = tmp_path / "range"
    monkeypatch.setattr(ranks, "_RANGE_FILE", file)
    return file.write_text


def test_an_outgoing_connection_cannot_take_the_port(ports):
    ports("32768\t60999\n")
    assert all(20_000 <= free_port() < 32_768 for _ in range(50))


def test_a_port_in_use_is_not_chosen(ports, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        number = taken.getsockname()[1]
        # The only port below the range of outgoing connections; without it the kernel chooses.
        monkeypatch.setattr(ranks, "_LOWEST", number)
        ports(f"{number + 1} 60999")
        assert free_port() not in {number, 0}


@pytest.mark.parametrize("text", ["1024 65535", "", "none"])
def test_a_host_without_ports_below_that_range_has_a_port_too(ports, text):
    ports(text)
    with socket.socket() as probe:
        probe.bind(("", free_port()))


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


def test_a_port_that_is_taken_is_named():
    with listen("127.0.0.1", 0) as first, pytest.raises(OSError, match=rf"127.0.0.1:{first.getsockname()[1]} \("):
        listen("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(("names", "found"), [(["eth0"], None), (["lo0", "eth0"], "lo0")])
def test_the_name_of_the_loopback_differs_between_systems(monkeypatch, names, found):
    monkeypatch.setattr(ranks.socket, "if_nameindex", lambda: list(enumerate(names)))
    assert loopback_interface() == found


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
