"""The hosts of the test bed and their addresses: one for each device, and one that controls them."""

# The interface of each host, in its own network namespace.
INTERFACE = "wan0"

# A network that is nowhere else, even by accident: it exists between these namespaces only.
NETMASK = "255.255.0.0"
_NETWORK = "10.99"
_CONTROL = 1
_MOST_HOSTS = 1 << 16


def control_address() -> str:
    """Return the IPv4 address of the host in which the agent and the store of a run are."""
    return _address(_CONTROL)


def device_address(rank: int) -> str:
    """Return the IPv4 address of a rank's host."""
    return _address(_CONTROL + 1 + rank)


def _address(number: int) -> str:
    assert number < _MOST_HOSTS - 1, "a plan has fewer devices"
    return f"{_NETWORK}.{number >> 8}.{number & 0xFF}"
