"""Two hosts for each of several links, emulated below TCP, and commands of ropebridge that run in them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from executor.wan.testbed import missing
from planner.scenario.cluster import Cluster, Link
from tests.helpers.networks.isolated_program import run_isolated
from tests.helpers.scenarios.builders import mesh_scenario
from traces.trace import LinkTrace

RESPONDER = "RESPONDER"


@dataclass(frozen=True)
class LinkedHosts:
    """A near host, a far one on which a responder listens, and commands for the near one.

    Attributes:
        bandwidth_bps: Of the link, each way.
        latency_s: One way.
        commands: One after the other; `RESPONDER` stands for the responder's address.
        trace: Of the link, from 1 s after the responder's start on; None if it is steady.
        wmem_bytes: Largest send buffer of both hosts; None for the system's.
    """

    bandwidth_bps: float
    latency_s: float
    commands: Sequence[Sequence[str]]
    trace: LinkTrace | None = None
    wmem_bytes: int | None = None


@dataclass(frozen=True)
class Outcome:
    returncode: int
    stdout: str
    stderr: str


@cache
def lack() -> str | None:
    return missing()


def run_in_hosts(pairs: Sequence[LinkedHosts], folder: Path) -> list[list[Outcome]]:
    """Run the commands of all pairs, side by side; return the outcomes of each pair's, the responder's at the end."""
    if lack() is not None:
        pytest.skip(str(lack()))
    count = 2 * len(pairs)
    scenario = mesh_scenario(count, [0.001] * count, [0.002] * count)
    links = []
    for number, pair in enumerate(pairs):
        ends = (f"device-{2 * number}", f"device-{2 * number + 1}")
        links += [Link(*each, pair.bandwidth_bps, pair.latency_s, pair.trace) for each in (ends, ends[::-1])]
    whole = replace(scenario, cluster=Cluster(scenario.cluster.devices, tuple(links)))
    orders = [
        {"near": 2 * number, "far": 2 * number + 1, "wmem": pair.wmem_bytes, "commands": pair.commands}
        for number, pair in enumerate(pairs)
    ]
    program = Path(__file__).with_name("linked_hosts_program.py")
    outcomes = run_isolated(program, folder, whole, orders, timeout_s=150)
    return [[Outcome(*each) for each in pair] for pair in outcomes]
