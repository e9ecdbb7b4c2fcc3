"""The server: HTTP over TLS, and JSON, around the store. Nothing is answered to who does not know the token.

=========================================== ============================================ ==============================
request                                     body                                         answer
=========================================== ============================================ ==============================
PUT  /jobs/JOB                              the job's files, a zip file                  the job
GET  /jobs                                                                               all jobs, and all hosts
GET  /jobs/JOB                                                                           the job with its events
POST /jobs/JOB/stop                                                                      the job's new state
GET  /jobs/JOB/files                                                                     the job's files
GET  /jobs/JOB/attempts/N/log?first_byte=K                                               a piece of the log
PUT  /jobs/JOB/attempts/N/log?first_byte=K  the next piece of the log                    how many bytes the server has
POST /jobs/JOB/end                          `AttemptEnd`                                 whether the report counts
POST /hosts/HOST                            `Heartbeat`                                  `Assignments`
POST /hosts/HOST/leave?incarnation=K                                                     an empty object
=========================================== ============================================ ==============================

A refusal is ``{"error": MESSAGE}``: 401 without the token, 404 for an unknown job, 409 for a contradiction, 413 for a
body that is too large, 422 for wrong input. Requests may be sent again when no answer came; see `Store`.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from experiments.runs.jobs.access import check_given_token, is_allowed, listen_at, make_token, tls_of
from experiments.runs.jobs.messages import BODY_BYTES, LOG_PIECE_BYTES, NAME, Assignments, AttemptEnd, Heartbeat, parse
from experiments.runs.jobs.packing import check_submission
from experiments.runs.jobs.store import ConflictError, Store, UnknownJobError
from traces.common.errors import InputError

# Documents are far smaller than jobs; only a job's files may have `BODY_BYTES`.
_DOCUMENT_BYTES = 4 << 20

_MOST_CONNECTIONS = 256

# How long a connection may take to prove that it knows the token, in seconds.
_PROOF_S = 5.0

_MOST_NUMBER = (1 << 62) - 1

Clock = Callable[[], float]
_Name = Annotated[str, InPath(pattern=f"^{NAME}$")]
_Number = Annotated[int, InPath(ge=0, le=_MOST_NUMBER)]
_NumberOption = Annotated[int, Query(ge=0, le=_MOST_NUMBER)]


class _TokenFirst:
    """Answers requests without the token, before anything else of them is looked at."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("authorization", "") if scope["type"] == "http" else ""
        if scope["type"] == "http" and is_allowed(given.encode("latin-1"), self._token):
            await self._app(scope, receive, send)
            return
        refusal = JSONResponse(
            {"error": "this request carries no valid token"}, 401, headers={"WWW-Authenticate": "Bearer"}
        )
        await refusal(scope, receive, send)


async def _read(request: Request, most_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most_bytes:
            raise HTTPException(413, f"the body has more than {most_bytes} bytes")
    return bytes(body)


async def _document(request: Request) -> bytes:
    return await _read(request, _DOCUMENT_BYTES)


async def _files(request: Request) -> bytes:
    return await _read(request, BODY_BYTES)


async def _log_piece(request: Request) -> bytes:
    return await _read(request, LOG_PIECE_BYTES)


_Document = Annotated[bytes, Depends(_document)]
_Files = Annotated[bytes, Depends(_files)]
_LogPiece = Annotated[bytes, Depends(_log_piece)]


def make_app(store: Store, token: str, clock: Clock = time.time) -> ASGIApp:
    """Return the server as an ASGI application around a store."""
    # No page describes the interface: it would be the only one without the token.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    _add_job_routes(app, store, clock)
    _add_host_routes(app, store, clock)

    @app.exception_handler(InputError)
    def refuse(_: Request, error: InputError) -> JSONResponse:
        status = 404 if isinstance(error, UnknownJobError) else 409 if isinstance(error, ConflictError) else 422
        return JSONResponse({"error": str(error)}, status)

    @app.exception_handler(AnyHTTPException)
    def refuse_request(_: Request, error: AnyHTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def refuse_address(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 422)

    return _TokenFirst(app, token)


def _add_job_routes(app: FastAPI, store: Store, clock: Clock) -> None:
    @app.put("/jobs/{job}")
    def submit(job: _Name, body: _Files) -> dict[str, Any]:
        store.submit(job, check_submission(body), clock())
        return store.job(job, clock())

    @app.get("/jobs")
    def jobs() -> dict[str, Any]:
        return {"jobs": store.jobs(clock()), "hosts": store.hosts(clock())}

    @app.get("/jobs/{job}")
    def status(job: _Name) -> dict[str, Any]:
        return store.job(job, clock())

    @app.post("/jobs/{job}/stop")
    def stop(job: _Name) -> dict[str, Any]:
        return {"state": store.stop(job, clock())}

    @app.get("/jobs/{job}/files")
    def files(job: _Name) -> Response:
        return Response(store.content(job), media_type="application/zip")

    @app.get("/jobs/{job}/attempts/{attempt}/log")
    def log(job: _Name, attempt: _Number, first_byte: _NumberOption) -> Response:
        return Response(store.log(job, attempt, first_byte, LOG_PIECE_BYTES), media_type="application/octet-stream")


def _add_host_routes(app: FastAPI, store: Store, clock: Clock) -> None:
    @app.put("/jobs/{job}/attempts/{attempt}/log")
    def add_log(job: _Name, attempt: _Number, first_byte: _NumberOption, body: _LogPiece) -> dict[str, Any]:
        return {"log_bytes": store.add_log(job, attempt, first_byte, body)}

    @app.post("/jobs/{job}/end")
    def end(job: _Name, body: _Document) -> dict[str, Any]:
        return {"counts": store.end(job, parse(AttemptEnd, body), clock())}

    @app.post("/hosts/{host}")
    def hear(host: _Name, body: _Document) -> dict[str, Any]:
        return asdict(Assignments(store.lease_s, store.hear(host, parse(Heartbeat, body), clock())))

    @app.post("/hosts/{host}/leave")
    def leave(host: _Name, incarnation: _NumberOption) -> dict[str, Any]:
        store.leave(host, incarnation, clock())
        return {}


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that soon closes connections which prove nothing; uvicorn would wait a minute for each."""

    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        """Create a server with the limit on handshakes."""
        return await super().create_server(*arguments, **options, ssl_handshake_timeout=_PROOF_S)


def make_server(app: ASGIApp, token: str) -> uvicorn.Server:
    """Return a server that answers over TLS, to those alone who know the token."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )
    config.load()
    config.ssl = tls_of(token, is_server=True)
    return uvicorn.Server(config)


def run_server(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serve connections until a signal ends the process, or another thread sets ``server.should_exit``."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(server.serve(sockets=[listening]))


def serve(folder: Path, host: str, port: int, lease_s: float, tell: Callable[[str], None]) -> None:
    """Serve the store in a folder at one address, until a signal ends the process.

    Args:
        folder: The folder of the store and of the token; it is made if it is missing.
        host: The address to listen at.
        port: The port to listen at.
        lease_s: Time in seconds after which a host that sends no heartbeat counts as lost.
        tell: Called with the address when the server listens.

    Raises:
        InputError: The folder or the address cannot be used.
    """
    # First the address and the token, so that no folder is made where one of them cannot be used.
    check_given_token(folder)
    with listen_at(host, port) as listening, closing(Store(folder, lease_s, time.time())) as store:
        token = make_token(folder)
        address, bound = listening.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        tell(f"serving jobs at https://{shown}:{bound}; each request needs the token in {folder / 'token'}")
        run_server(make_server(make_app(store, token), token), listening)
