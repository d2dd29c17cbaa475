"""The loopback interface of this host: its processes connect there without being reachable from other hosts."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping

from titanlab.distributed.ranks import Ranks

_ADDRESSES = ("127.0.0.1", "::1")


_INTERFACES = ("lo", "lo0")  # Linux; macOS and the BSDs


def is_loopback(address: str) -> bool:
    """Whether an address, or all addresses of a name, are this host's loopback."""
    with contextlib.suppress(OSError, ValueError, UnicodeError):
        addresses = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(address, None)]
        return bool(addresses) and all(ip.is_loopback for ip in addresses)
    return False


def loopback_address() -> str | None:
    """The loopback address on which a process can listen: of IPv4, or of IPv6 without IPv4; None: there is none."""
    for address in _ADDRESSES:
        with contextlib.suppress(OSError), listen(address, 0):
            return address
    return None


def loopback_interface() -> str | None:
    """The name of the loopback interface; None: unknown."""
    with contextlib.suppress(OSError):
        names = {name for _, name in socket.if_nameindex()}
        return next((name for name in _INTERFACES if name in names), None)
    return None


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on this address only.

    Raises:
        OSError: another process has the port.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        # A run that has just ended leaves connections in TIME_WAIT, which would block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen at {address}:{port} ({error.strerror})") from error
    return listener


def is_one_host(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether all ranks are known to be on this host.

    Ranks started by hand may lack LOCAL_WORLD_SIZE; then `local_world` is only a default and proves nothing.
    """
    is_counted = ranks.is_counted or "TORCHELASTIC_RUN_ID" in environ
    return is_loopback(ranks.address) or (is_counted and ranks.local_world == ranks.world)
