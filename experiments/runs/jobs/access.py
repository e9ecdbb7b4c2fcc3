"""The address of the server, and its token: the secret of the TLS connections, and of each request in them."""

import hashlib
import hmac
import os
import secrets
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from executor.core.tls import context
from traces.common.errors import InputError
from traces.common.text import read_regular

# Environment variables of users and hosts.
SERVER_VARIABLE, TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "ROPEBRIDGE_SERVER", "ROPEBRIDGE_TOKEN", "ROPEBRIDGE_TOKEN_FILE"

DEFAULT_PORT = 29500
DEFAULT_SERVER = f"https://127.0.0.1:{DEFAULT_PORT}"

_TOKEN_BYTES = 32
_FEWEST_CHARACTERS = 16
_TOKEN_FILE = "token"

# Whoever connects to the server can try guesses at the token; each one costs this many hashes, some 0.1 s of a core.
_HASHES = 200_000


@dataclass(frozen=True, slots=True)
class Access:
    """Where the server is, and the token."""

    server: str
    token: str


def find_access(server: str | None, token_file: Path | None, environment: Mapping[str, str] = os.environ) -> Access:
    """Return the access by the options of a command, or else by the environment.

    Raises:
        InputError: There is no token, or the server's address is no URL.
    """
    url = (server or environment.get(SERVER_VARIABLE) or DEFAULT_SERVER).rstrip("/")
    if not _is_address(url):
        raise InputError(f"'{url}' is no address of a server", "--server", f"write it as {DEFAULT_SERVER}")
    token = environment.get(TOKEN_VARIABLE) if token_file is None else None
    named = token_file or environment.get(TOKEN_FILE_VARIABLE)
    if not token and not named:
        raise InputError(
            "the server asks for a token",
            where="--token-file",
            valid=f"name the file 'token' in the server's folder, or set {TOKEN_VARIABLE}",
        )
    return Access(url, check_token(token, TOKEN_VARIABLE) if token else read_token(Path(named or "")))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_place = bool(parts.hostname) and parts.port != 0 and not parts.netloc.endswith(":")
    except ValueError:
        return False
    has_more = parts.path or any(each in "@?#;\\" or each.isspace() or not each.isprintable() for each in url)
    return parts.scheme == "https" and is_place and not has_more


def check_given_token(folder: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `InputError` if the token is wrong that `make_token` would return and not make."""
    if environment.get(TOKEN_VARIABLE) or (folder / _TOKEN_FILE).exists():
        make_token(folder, environment)


def make_token(folder: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Return the token of a server: of the environment, or of its folder, where the first start writes a random one.

    Raises:
        InputError: The token is too short, or other users can read the file.
    """
    if token := environment.get(TOKEN_VARIABLE):
        return check_token(token, TOKEN_VARIABLE)
    path = folder / _TOKEN_FILE
    if not path.exists():
        # Linked into place when it is complete, so that a server killed here leaves no empty token.
        part = folder / f".{_TOKEN_FILE}.{secrets.token_hex(4)}"
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(_TOKEN_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    return read_token(path)


def read_token(path: Path) -> str:
    """Return the token in a file that its owner alone can read."""
    try:
        mode, token = path.stat().st_mode, read_regular(path).decode().strip()
    except InputError as error:
        raise error.within(str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(f"the token cannot be read: {reason}", str(path), "copy the server's file 'token'") from None
    if mode & 0o077:
        raise InputError("other users can read the token", where=str(path), valid=f"chmod 600 {path}")
    return check_token(token, str(path))


def check_token(token: str, where: str) -> str:
    """Return a token; raise `InputError` if it can be guessed, or cannot be sent."""
    if len(token) < _FEWEST_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(
            "this is no token", where=where, valid=f"give {_FEWEST_CHARACTERS} or more ASCII characters without blanks"
        )
    return token


def is_allowed(authorization: bytes, token: str) -> bool:
    """Return whether a request's header ``Authorization`` carries the token, in a time that does not tell where not."""
    return hmac.compare_digest(authorization, f"Bearer {token}".encode())


@lru_cache(maxsize=4)
def tls_of(token: str, *, is_server: bool) -> ssl.SSLContext:
    """Return the settings of TLS with which server and clients prove to each other that they know the token."""
    secret = hashlib.pbkdf2_hmac("sha256", token.encode(), b"ropebridge serve", _HASHES)
    return context(secret, is_server=is_server)


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at one address of this machine.

    Raises:
        InputError: The address is not this machine's, is taken, or stands for all addresses.
    """
    valid = "give one address of this machine, such as 127.0.0.1:29500, or 10.7.0.1:29500 in a private network"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if ip_address(str(address[0]).partition("%")[0]).is_unspecified:
            raise InputError(f"'{host}' stands for all addresses of this machine", where="--listen", valid=valid)
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        problem = f"{host}:{port}: no server can listen here: {error.strerror or error}"
        raise InputError(problem, where="--listen", valid=valid) from None
