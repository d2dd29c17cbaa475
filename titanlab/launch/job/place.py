"""Where the ranks of a job meet: an address and a port of rank 0."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from titanlab.errors import ConfigError
from titanlab.launch.contract import Launcher, Place

_LOOPBACK = "127.0.0.1"


def address_of(launcher: Launcher, place: Place, environ: Mapping[str, str]) -> str:
    """Where rank 0, this process, can be reached by all ranks: a given address, or one that the launcher knows.

    Raises:
        ConfigError: nothing of that leads anywhere.
    """
    given = environ.get("MASTER_ADDR")
    if given:
        return given
    if len(place.nodes) <= 1:
        return _LOOPBACK
    for name in launcher.addresses(place, environ):
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            continue
        return name
    rule = f"the first node, {place.nodes[0]}, has no address that this host can resolve"
    raise ConfigError("MASTER_ADDR", None, rule, "set MASTER_ADDR in launch.environment")


def free_port(environ: Mapping[str, str]) -> int:
    """A port of this host that nobody has: the given one, or one that could be bound a moment ago.

    Raises:
        ConfigError: the given one is no number.
    """
    given = environ.get("MASTER_PORT")
    if given:
        if not given.isdecimal() or not 0 < int(given) < 65_536:
            raise ConfigError("MASTER_PORT", given, "is no port", "try MASTER_PORT=29500, or unset it")
        return int(given)
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
