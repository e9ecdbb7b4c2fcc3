"""Two devices in two regions, with one link whose rate changes."""

from dataclasses import replace

from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import chain_scenario
from traces.trace import LinkTrace

# Two devices in two regions, four layers of 0.05 s forward and 0.1 s backward for a sample; 1 MB of it crosses.
LAYERS = 4
NOMINAL_BPS = 200e6


def wide_scenario(*rates_at: tuple[float, float], parameter_bytes: int = 4_000_000, ends_s: float = 1e5) -> Scenario:
    """One link; its rates are (second, bits per second), repeated after ``ends_s`` seconds."""
    base = chain_scenario(
        [0.05] * LAYERS,
        [0.1] * LAYERS,
        output_bytes=[1_000_000] * LAYERS,
        parameter_bytes=parameter_bytes,
        global_batch=16,
    )
    tables = base.model.layers[0].times
    everywhere = {f"kind-{index}": table for index in range(2) for table in tables.values()}
    layers = tuple(
        replace(layer, times={**everywhere, **{key: next(iter(everywhere.values())) for key in everywhere}})
        for layer in base.model.layers
    )
    trace = None
    if rates_at:
        times_s, rates_bps = zip(*rates_at, strict=True)
        trace = LinkTrace(times_s, rates_bps, ends_s)
    links = tuple(
        replace(link, bandwidth_bps=NOMINAL_BPS, latency_s=0.01, trace=trace)
        for link in base.cluster.links
        if {link.source, link.target} == {"region-0", "region-1"}
    )
    cluster = Cluster(base.cluster.devices[:2], links)
    return replace(base, cluster=cluster, model=replace(base.model, layers=layers))


def on_one_device(scenario: Scenario) -> Plan:
    stage = Stage(0, LAYERS, (Replica("device-0"),), 1)
    return Plan(scenario.name, scenario.model.name, "test", "1f1b", (Pipeline((stage,), (16,)),))
