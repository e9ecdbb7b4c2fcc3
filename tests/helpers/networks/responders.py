"""Responders on this machine: the real command, and others that only seem to be one."""

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.processes.process_watch import started


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def responder(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Address and process of `ropebridge profile network --listen`, which must leave nothing behind."""
    address = f"127.0.0.1:{free_port()}"
    folder.mkdir()
    with started(["profile", "network", "--listen", address], folder) as (process, _):
        assert process.stderr is not None
        assert address in process.stderr.readline()
        yield address, process
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=30)


@contextmanager
def server(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Address of somebody who does something to whoever connects, and then hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                # Who asks whether anybody listens connects and is gone before the answer.
                with connection, suppress(OSError):
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=30)
