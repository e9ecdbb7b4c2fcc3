"""A server of jobs in a thread of the test, with a real store and real requests."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiments.runs.jobs.access import Access, listen_at, make_token
from experiments.runs.jobs.client import Client
from experiments.runs.jobs.server import make_app, make_server, run_server
from experiments.runs.jobs.store import Store
from tests.helpers.networks.several_hosts import free_port

# No lease runs out during a test, however busy the machine is.
LEASE_S = 3600.0


@dataclass
class JobServer:
    """A server under way."""

    access: Access
    token_file: Path
    store: Store

    @property
    def client(self) -> Client:
        return Client(self.access)

    @property
    def options(self) -> list[str]:
        """Of the commands that are to use this server."""
        return ["--server", self.access.server, "--token-file", str(self.token_file)]


@contextmanager
def job_server(folder: Path) -> Iterator[JobServer]:
    store = Store(folder, LEASE_S, time.time())
    token, port = make_token(folder, {}), free_port()
    with listen_at("127.0.0.1", port) as listening:
        server = make_server(make_app(store, token), token)
        thread = threading.Thread(target=run_server, args=(server, listening))
        thread.start()
        try:
            yield JobServer(Access(f"https://127.0.0.1:{port}", token), folder / "token", store)
        finally:
            server.should_exit = True
            thread.join()
            store.close()
