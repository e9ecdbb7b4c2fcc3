"""The cases of the bench of adaptation: three scenarios of three regions, each with pairs of traces on its two links.

- ``cloud-edge-end``: five unlike devices, as in the file of this name.
- ``alike``: one device in each region, all of the kind that is in its cloud.
- ``large``: a model of eight times as many layers, on devices of which none holds it.

Strategy and policy may let messages between regions have `COMPRESSIONS`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from experiments.benches.cases import TRACES_VARIABLE, draw_seeds
from experiments.benches.planning.adaptation_traces import TracePair, trace_pairs
from experiments.runs.scenario import choose_scenario
from planner.adapt.policy import Policy
from planner.plan.plan import Plan
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.scenario import Scenario, allowing_compressions
from sim.simulator import Simulator
from traces.trace import LinkTrace

COMPRESSIONS = ("none", "int8")

# Bar: the least throughput with a policy, as a share of that of the plan it starts with.
LEAST_GAIN = 0.98

# A number of steps that no run reaches, since runs end after their duration.
_ENDLESS = 10**9

_FILE = "cloud-edge-end"

# Of the large model: how often each layer is repeated, and the kind of device that replaces those with more memory.
_REPEATED = 8
_SMALL_KIND = "jetson-xavier-nx"


@dataclass(frozen=True, slots=True)
class AdaptationCase:
    """A scenario with a pair of traces of one half on its links between regions."""

    half: str
    pair: TracePair
    scenario: Scenario


def drawn(
    found: Sequence[AdaptationCase], count: int, seed: int | None, tell: Callable[[str], None]
) -> list[AdaptationCase]:
    """Return at most ``count`` of the cases in an order drawn at random; ``tell`` gets how to draw the same again."""
    return Random(draw_seeds("cases", 1, seed, tell)[0]).sample(found, min(count, len(found)))


def usable_cases(halves: Sequence[str], tell: Callable[[str], None]) -> list[AdaptationCase]:
    """Return the cases of some halves of the traces; recorded ones are in the folder of ``ROPEBRIDGE_TRACES``."""
    folder = Path(os.environ[TRACES_VARIABLE]) if TRACES_VARIABLE in os.environ else None
    if folder is None:
        tell(f"only presets: {TRACES_VARIABLE} names no folder of recorded traces")
    return list(cases(halves, folder))


def cases(halves: Sequence[str], folder: Path | None) -> Iterator[AdaptationCase]:
    """Yield the cases of some halves of the traces; ``folder`` has recorded ones, None for presets only."""
    for scenario in scenarios():
        first, second = (link.bandwidth_bps for link in wide_area_links(scenario))
        for half in halves:
            for pair in trace_pairs(half, folder, (first, second)):
                yield AdaptationCase(half, pair, with_traces(scenario, pair.traces))


def scenarios() -> tuple[Scenario, ...]:
    """Return the scenarios, without traces."""
    own = allowing_compressions(choose_scenario(_FILE), COMPRESSIONS)
    devices = own.cluster.devices
    cloud = devices[0]
    alike = tuple(replace(cloud, name=f"{region}-gpu", region=region) for region in own.cluster.regions)
    small = next(device for device in devices if device.kind == _SMALL_KIND)
    weak = tuple(
        device if device.memory_bytes <= small.memory_bytes else replace(small, name=device.name, region=device.region)
        for device in devices
    )
    layers = tuple(
        replace(layer, name=f"{layer.name}-{copy}") for layer in own.model.layers for copy in range(_REPEATED)
    )
    large = replace(_with_devices(own, "large", weak), model=replace(own.model, layers=layers))
    return own, _with_devices(own, "alike", alike), large


def _with_devices(scenario: Scenario, name: str, devices: tuple[Device, ...]) -> Scenario:
    return replace(scenario, name=name, cluster=Cluster(devices, scenario.cluster.links))


def run_for(duration_s: float, scenario: Scenario, plan: Plan, policy: Policy | None = None) -> RunRecord:
    """Simulate ``duration_s`` seconds of a plan, with a policy if there is one."""
    return Simulator(duration_s=duration_s).run(scenario, plan, policy, _ENDLESS)


def wide_area_links(scenario: Scenario) -> list[Link]:
    """Return one direction of each link between two regions, in the scenario's order."""
    by_ends: dict[frozenset[str], Link] = {}
    for link in scenario.cluster.links:
        if link.source != link.target:
            by_ends.setdefault(frozenset((link.source, link.target)), link)
    return list(by_ends.values())


def with_traces(scenario: Scenario, traces: Sequence[LinkTrace]) -> Scenario:
    """Return the scenario with a trace on each link between regions, the same in both directions."""
    by_ends = {
        frozenset((link.source, link.target)): trace
        for link, trace in zip(wide_area_links(scenario), traces, strict=True)
    }
    links = tuple(
        replace(link, trace=by_ends.get(frozenset((link.source, link.target)))) for link in scenario.cluster.links
    )
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links))
