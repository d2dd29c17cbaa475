"""The rendezvous of a job's ranks: the address and port of rank 0."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from titanlab.distributed.ranks import free_port
from titanlab.errors import ConfigError
from titanlab.launch.contract import Launcher, Place

_LOOPBACK = "127.0.0.1"


def address_of(launcher: Launcher, place: Place, environ: Mapping[str, str]) -> str:
    """The address under which all ranks reach rank 0, which is this process: MASTER_ADDR, or the launcher's.

    Raises:
        ConfigError: no address can be resolved.
    """
    address = environ.get("MASTER_ADDR")
    if address:
        return address
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


def port_of(environ: Mapping[str, str]) -> int:
    """The port of rank 0: MASTER_PORT, or one that is free.

    Raises:
        ConfigError: MASTER_PORT is not a port number.
    """
    port = environ.get("MASTER_PORT")
    if port:
        if not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ConfigError("MASTER_PORT", port, "is no port", "try MASTER_PORT=29500, or unset it")
        return int(port)
    return free_port()
