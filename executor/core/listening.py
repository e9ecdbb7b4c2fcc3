"""Sockets that listen at the address that was named, and nowhere else."""

import socket

_BACKLOG = 1024


def listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens.

    Args:
        address: Of this host, by name or number, IPv6 as well; and a port, 0 for any.

    Raises:
        OSError: This host does not have it, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=_BACKLOG)
