"""Scenarios of hosts whose devices can share layers by tensor parallelism."""

from dataclasses import replace
from math import inf

from planner.plan.plan import Replica
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.datasheet import DeviceKind
from planner.scenario.effects import Effects
from planner.scenario.profile import ModelProfile
from planner.scenario.roofline import LayerWork, roofline_layer, sharded_models
from planner.scenario.scenario import Scenario
from planner.scenario.sharding import named_sharding
from planner.scenario.training import Training

KIND = DeviceKind("made-up", {"fp32": 1e12}, 2**34, 1e11, "made up")


def layer(name: str, how: str | None, input_bytes: int, *, first: bool = False) -> LayerWork:
    sharding = None if how is None else named_sharding(how, input_bytes, 4096, 40_000, is_first=first)
    return LayerWork(name, 4e8, 400_000, 4096, 40_000, sharding=sharding)


def scenario_of(works: list[LayerWork], hosts: int, *, inside: Link | None = None, most: int = 4) -> Scenario:
    """Hosts of ``most`` devices each; 100 Mbit/s between hosts, and ``inside`` each host a free link by default."""
    devices, links = [], [Link("here", "here", 100e6, 0.001)]
    for host in range(hosts):
        name = f"host-{host}"
        devices += [Device(f"{name}-{place}", "made-up", "here", 2**34, host=name) for place in range(most)]
        links.append(Link(name, name, inf, 0.0) if inside is None else replace(inside, source=name, target=name))
    layers = tuple(roofline_layer(work, [KIND], "fp32") for work in works)
    model = ModelProfile("made up", layers, sharded_models("made up", works, [KIND], "fp32", most))
    return Scenario("groups", Cluster(tuple(devices), tuple(links)), model, Training(8), effects=Effects())


def group(host: int, degree: int) -> Replica:
    names = [f"host-{host}-{place}" for place in range(degree)]
    return Replica(names[0], partners=tuple(names[1:]))
