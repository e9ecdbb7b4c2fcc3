"""The client of the server, for users and for hosts: requests over TLS with the token, and refusals as errors."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

from experiments.runs.jobs.access import TOKEN_VARIABLE, Access, tls_of
from experiments.runs.jobs.messages import (
    LOG_PIECE_BYTES,
    Assignments,
    AttemptEnd,
    Heartbeat,
    dump,
    parse,
)
from traces.common.errors import InputError, RunError


class NoAnswerError(RunError):
    """The server has not answered: whether it has done the request is unknown, so that it has to be sent again."""


class UnprovedServerError(NoAnswerError):
    """Whoever answers at the server's address does not know the token, and has not been told anything."""


class Client:
    """Sends requests to the server.

    Args:
        access: The server's address and the token.
        timeout_s: Time limit for each wait of a request, in seconds.
    """

    def __init__(self, access: Access, timeout_s: float = 10.0) -> None:
        self._access = access
        self._timeout_s = timeout_s
        # The token is for the server, not for a proxy that the environment names, and not for a place that it is
        # redirected to.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=tls_of(access.token, is_server=False)),
            _NoRedirects(),
        )

    def submit(self, job: str, files: bytes) -> dict[str, Any]:
        """Add a job to the queue; return it. If it is there already, nothing changes."""
        return self._json("PUT", f"/jobs/{job}", files)

    def jobs(self) -> dict[str, Any]:
        """Return all jobs and all hosts."""
        return self._json("GET", "/jobs")

    def job(self, job: str) -> dict[str, Any]:
        """Return a job with its events."""
        return self._json("GET", f"/jobs/{job}")

    def stop(self, job: str) -> str:
        """Ask a job to stop; return its new state."""
        return str(self._json("POST", f"/jobs/{job}/stop", b"")["state"])

    def log(self, job: str, attempt: int, first_byte: int) -> bytes:
        """Return the next piece of an attempt's log; empty at the end of what the server has."""
        return self._send("GET", f"/jobs/{job}/attempts/{attempt}/log?first_byte={first_byte}")

    def files(self, job: str) -> bytes:
        """Return the packed files of a job."""
        return self._send("GET", f"/jobs/{job}/files")

    def hear(self, host: str, heartbeat: Heartbeat) -> Assignments:
        """Send a host's heartbeat; return everything that the host shall run."""
        return parse(Assignments, self._send("POST", f"/hosts/{host}", dump(heartbeat)))

    def leave(self, host: str, incarnation: int) -> None:
        """Give the jobs of a host back that ends on purpose."""
        self._json("POST", f"/hosts/{host}/leave?incarnation={incarnation}", b"")

    def end(self, job: str, report: AttemptEnd) -> bool:
        """Report the end of an attempt; return whether the report counts."""
        return bool(self._json("POST", f"/jobs/{job}/end", dump(report))["counts"])

    def add_log(self, job: str, attempt: int, first_byte: int, piece: bytes) -> int:
        """Send the next piece of an attempt's log, of `LOG_PIECE_BYTES` at most; return how much the server has."""
        path = f"/jobs/{job}/attempts/{attempt}/log?first_byte={first_byte}"
        return int(self._json("PUT", path, piece[:LOG_PIECE_BYTES])["log_bytes"])

    def _json(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._send(method, path, body))
        return found

    def _send(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Return the body of the answer.

        Raises:
            InputError: The server refuses the request.
            UnprovedServerError: Another process than the server answers, or the token is another server's.
            NoAnswerError: There is no complete answer.
        """
        server = self._access.server
        request = urllib.request.Request(
            server + path,
            data=body,
            method=method,
            headers={"Authorization": f"Bearer {self._access.token}", "Content-Type": "application/octet-stream"},
        )
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLError):
                raise UnprovedServerError(
                    f"who answers at {server} does not know this token; give the server's file 'token' as "
                    f"'--token-file', or its content as {TOKEN_VARIABLE}"
                ) from None
            raise NoAnswerError(
                f"no server answers at {server}: {reason}; start it with 'ropebridge serve', or give '--server'"
            ) from None

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        if error.code == HTTPStatus.UNAUTHORIZED:
            valid = f"give the server's file 'token' as '--token-file', or its content as {TOKEN_VARIABLE}"
            return InputError("the server refuses the token", where=self._access.server, valid=valid)
        try:
            return InputError(str(json.loads(error.read())["error"]))
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return NoAnswerError(f"the server at {self._access.server} answers with status {error.code}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Return no request, so that the redirection becomes an error."""
