"""Where a responder listens: ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``."""

from dataclasses import dataclass

from traces.common.errors import InputError

DEFAULT_PORT = 7117

_VALID = "write HOST or HOST:PORT, an IPv6 address in brackets, for example '10.0.0.5:7117' or '[fd00::5]:7117'"


@dataclass(frozen=True, slots=True)
class Address:
    """A host, by name or number, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return what a person wrote; the port is `DEFAULT_PORT` where none is given.

    Raises:
        InputError: This is no address.
    """
    host, port = _split(text.strip())
    if not host or any(each.isspace() for each in host) or not _is_name(host):
        raise InputError(f"'{text}' is no address", valid=_VALID)
    if not port:
        return Address(host, DEFAULT_PORT)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise InputError(f"'{port}' in '{text}' is no port", valid="a port is a number from 1 to 65535")
    return Address(host, int(port))


def _is_name(host: str) -> bool:
    """Whether it can be looked up: no part of it is empty or longer than names in a network are."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _split(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or rest == ":":
            return "", ""
        return host, rest[1:]
    if text.count(":") > 1:
        return text, ""
    host, colon, port = text.partition(":")
    return (host, port) if port or not colon else ("", "")
