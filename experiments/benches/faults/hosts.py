"""Emulated hosts: network namespaces, joined by the relay of the emulated links, in which commands are started.

As a program, ``python -m experiments.benches.faults.hosts FOLDER`` runs the relay of the scenario in a folder,
which has one device for each host, and prints the paths of the hosts' networks as a JSON line; with the first line that
it reads, second 0 of the links begins, and it ends with its standard input.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from executor.core.clock import announce_origin, create_origin
from executor.core.job import JobFolder, RunConfig
from executor.core.subprocesses import python_environment
from executor.wan.testbed import NETWORKS, running_relay
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.faults import LinkOutage
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import Training

_GRACE_S = 10.0
_BANDWIDTH_BPS, _LATENCY_S = 200e6, 0.005


class EmulatedHosts:
    """Hosts that are joined with each other while the context lasts.

    Args:
        names: The names of the hosts.
        folder: A new folder for the relay's files.
        cuts: Start and end, in seconds after `begin`, of the times in which no link carries anything.
    """

    def __init__(self, names: Sequence[str], folder: Path, cuts: Sequence[tuple[float, float]]) -> None:
        self._names = names
        self._folder = folder
        folder.mkdir()
        scenario = _scenario(names, cuts)
        JobFolder(folder).write(scenario, _plan(scenario), RunConfig("paced", 1, "relay", adapts=False))
        create_origin(JobFolder(folder).origin)

    def __enter__(self) -> Self:
        program = [sys.executable, "-m", "experiments.benches.faults.hosts", str(self._folder)]
        isolated = [sys.executable, "-m", "executor.wan.linux", "run", str(os.getpid()), *program]
        self._stack = ExitStack()
        self._process = self._stack.enter_context(
            subprocess.Popen(
                isolated, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=python_environment()
            )
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the emulated hosts did not start: status {self._process.wait()}")
        self._networks = dict(zip(self._names, json.loads(line), strict=True))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._stack.close()

    def begin(self) -> None:
        """Let second 0 of the links be now."""
        assert self._process.stdin is not None
        self._process.stdin.write("begin\n")
        self._process.stdin.flush()

    def within(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs a command in a host."""
        users = f"/proc/{self._process.pid}/ns/user"
        return [sys.executable, "-m", "executor.wan.linux", "enter", self._networks[name], users, *command]


def _scenario(names: Sequence[str], cuts: Sequence[tuple[float, float]]) -> Scenario:
    table = TimeTable((1,), (0.001,), (0.001,), (0.001,))
    layers = tuple(LayerProfile(f"layer-{name}", 1000, 1000, 1000, {"host": table}) for name in names)
    devices = tuple(Device(f"at-{name}", "host", name, 2**30) for name in names)
    links = tuple(
        Link(source, target, _BANDWIDTH_BPS, _LATENCY_S) for source in names for target in names if source != target
    )
    faults = tuple(LinkOutage(link.name, start_s, end_s) for start_s, end_s in cuts for link in links)
    model = ModelProfile("none", layers)
    return Scenario("hosts", Cluster(devices, links), model, Training(len(names), microbatch=1), faults=faults)


def _plan(scenario: Scenario) -> Plan:
    """Return a plan that uses the devices in their order, by which ranks have their numbers."""
    devices = scenario.cluster.devices
    stages = tuple(
        Stage(number, number + 1, (Replica(device.name),), len(devices) - number)
        for number, device in enumerate(devices)
    )
    pipeline = Pipeline(stages, (1,) * len(devices))
    return Plan(scenario.name, scenario.model.name, "by hand", "1f1b", (pipeline,))


def serve(folder: str) -> None:
    """Run the relay of the hosts until standard input ends."""
    job = JobFolder(Path(folder))
    with running_relay(job):
        print(os.environ[NETWORKS].strip(), flush=True)
        if sys.stdin.readline():
            announce_origin(job.origin, time.monotonic())
            sys.stdin.read()


if __name__ == "__main__":
    serve(*sys.argv[1:])
