"""A port on which rank 0 can listen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

# Linux gives ports of this range to connections that ask for none. Elsewhere the range is not read, and 49152 is its
# usual start.
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_START = 49152
_LOWEST = 20_000
_TRIES = 100


def free_port() -> int:
    """A TCP port of this host that can be bound now, on all addresses.

    It is outside the range from which the kernel takes ports for outgoing connections. A port of that range may be
    gone before rank 0 listens on it, a second or more later.
    """
    below = _start_of_outgoing_ports()
    for _ in range(_TRIES if below > _LOWEST else 0):
        port = random.SystemRandom().randrange(_LOWEST, below)
        if _bound(port):
            return port
    return _bound(0)


def _start_of_outgoing_ports() -> int:
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_START


def _bound(port: int) -> int:
    """The port that this bind got, or 0 if it is in use."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return 0
        return int(probe.getsockname()[1])
