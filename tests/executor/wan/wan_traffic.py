"""Sends TCP and echoes UDP between hosts of a test bed: run in the control host's network, as the agent is.

Called as ``python wan_traffic.py JOB_FOLDER FLOWS``, with FLOWS a JSON list of ``[kind, source rank, target rank,
seconds]``. Prints a JSON list of what each flow measured; times are seconds of the run.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executor.core.clock import announce_origin
from executor.core.job import JobFolder
from executor.core.subprocesses import die_with_parent
from executor.wan.testbed import device_address, enter_device_network, running_relay

PORT = 5000
HEAD_START_S = 0.3
PINGS = 40


def send(target: int, duration_s: float, origin_s: float) -> None:
    """Send as fast as TCP lets, in numbered blocks."""
    with socket.create_connection((device_address(target), PORT)) as connection:
        time.sleep(max(0.0, origin_s - time.monotonic()))
        block = 0
        while time.monotonic() < origin_s + duration_s:
            connection.sendall(block.to_bytes(8, "big") * 8192)
            block += 1


def receive(listening: socket.socket, origin_s: float) -> dict[str, Any]:
    """When how many bytes had arrived, and whether they are those that were sent."""
    connection, _ = listening.accept()
    arrivals: list[tuple[float, int]] = []
    content, total = bytearray(), 0
    while data := connection.recv(1 << 20):
        total += len(data)
        content += data
        arrivals.append((time.monotonic() - origin_s, total))
    right = all(
        content[place : place + (1 << 16)] == number.to_bytes(8, "big") * 8192
        for number, place in enumerate(range(0, total, 1 << 16))
    )
    return {"arrivals": arrivals, "right": right}


def ping(target: int, duration_s: float, origin_s: float) -> dict[str, Any]:
    """Round trips of single packets."""
    round_trips_s = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(5.0)
        time.sleep(max(0.0, origin_s - time.monotonic()))
        for _ in range(PINGS):
            start_s = time.monotonic()
            client.sendto(b"ping", (device_address(target), PORT))
            client.recv(100)
            round_trips_s.append(time.monotonic() - start_s)
            time.sleep(duration_s / PINGS)
        client.sendto(b"", (device_address(target), PORT))
    return {"round_trips_s": round_trips_s}


def echo(server: socket.socket) -> None:
    """Send back each packet until an empty one comes."""
    while True:
        data, sender = server.recvfrom(100)
        if not data:
            return
        server.sendto(data, sender)


def on(rank: int, act: Callable[[], object]) -> tuple[int, int]:
    """Act in a process of its own in a rank's network; return its id, and where its result can be read."""
    reading, writing = os.pipe()
    parent, process = os.getpid(), os.fork()
    if process == 0:
        status = 1
        try:
            die_with_parent(parent)
            os.environ["RANK"] = str(rank)
            enter_device_network()
            os.write(writing, json.dumps(act()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return process, reading


def outcome(process: int, reading: int) -> Any:
    with os.fdopen(reading) as result:
        text = result.read()
    _, status = os.waitpid(process, 0)
    assert status == 0, "a process of the traffic failed"
    return json.loads(text)


def flow(kind: str, source: int, target: int, duration_s: float, origin_s: float) -> list[tuple[int, int]]:
    """Start both ends of a flow; return them, the one that measures first."""
    sockets = socket.SOCK_DGRAM if kind == "ping" else socket.SOCK_STREAM

    def serve() -> object:
        with socket.socket(socket.AF_INET, sockets) as server:
            server.bind(("", PORT))
            if kind == "ping":
                return echo(server)
            server.listen()
            return receive(server, origin_s)

    serving = on(target, serve)
    # Until it listens: nobody answers sooner than the run starts.
    time.sleep(0.05)
    if kind == "ping":
        return [on(source, lambda: ping(target, duration_s, origin_s)), serving]
    return [serving, on(source, lambda: send(target, duration_s, origin_s))]


def main(folder: str, flows: str) -> None:
    job = JobFolder(Path(folder))
    with running_relay(job):
        wanted = json.loads(flows)
        origin_s = time.monotonic() + HEAD_START_S + 0.1 * len(wanted)
        announce_origin(job.origin, origin_s)
        started = [flow(*each, origin_s) for each in wanted]
        outcomes = [[outcome(*end) for end in ends] for ends in started]
    print(json.dumps([measured for measured, _ in outcomes]))


if __name__ == "__main__":
    main(*sys.argv[1:])
