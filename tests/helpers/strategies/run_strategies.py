"""Random scenarios with plans that they can carry out, for property tests."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from planner.plan.plan import ALGORITHMS, Plan, Synchronisation
from planner.scenario.cluster import Cluster, Link
from planner.scenario.effects import ComputeEffects, Effects, NetworkEffects, Slowdown, Straggler
from planner.scenario.faults import Absence, Fault, Hang, LinkOutage
from planner.scenario.scenario import Scenario
from planner.scenario.training import COMPRESSIONS
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from traces.trace import LinkTrace

TIMES_S = st.one_of(st.just(0.0), st.floats(1e-3, 10.0))
RATES_BPS = st.floats(1e3, 1e6)


@st.composite
def meshes(draw: st.DrawFn, devices: int, layers: int, global_batch: int, regions: list[str] | None = None) -> Scenario:
    """A link for every ordered pair of devices, every number random."""

    def column(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=layers, max_size=layers))

    pairs = devices * devices
    rates_bps = draw(st.lists(RATES_BPS, min_size=pairs, max_size=pairs))
    latencies_s = draw(st.lists(TIMES_S, min_size=pairs, max_size=pairs))
    return mesh_scenario(
        devices,
        column(TIMES_S),
        column(st.floats(1e-3, 10.0)),
        output_bytes=[round(size) for size in column(st.floats(0, 1e4))],
        parameter_bytes=[round(size) for size in column(st.floats(0, 1e4))],
        link=lambda a, b: (rates_bps[a * devices + b], latencies_s[a * devices + b]),
        global_batch=global_batch,
        regions=regions,
    )


@st.composite
def recomputing(draw: st.DrawFn, plan: Plan) -> Plan:
    """The plan with some of its stages recomputed."""
    pipelines = []
    for pipeline in plan.pipelines:
        chosen = draw(st.lists(st.booleans(), min_size=len(pipeline.stages), max_size=len(pipeline.stages)))
        stages = (replace(stage, recompute=each) for stage, each in zip(pipeline.stages, chosen, strict=True))
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))


@st.composite
def chains(draw: st.DrawFn) -> tuple[Scenario, Plan]:
    """One device a stage, every number random, depths that never grow."""
    stages = draw(st.integers(1, 5))
    layers = draw(st.integers(stages, stages + 2))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    depths = sorted(draw(st.lists(st.integers(1, 8), min_size=stages, max_size=stages)), reverse=True)
    bounds = [*sorted(draw(st.permutations(range(1, layers)))[: stages - 1]), layers]
    scenario = draw(meshes(stages, layers, sum(sizes)))
    schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    stage_list = [(end, 1, depth) for end, depth in zip(bounds, depths, strict=True)]
    return scenario, draw(recomputing(layered_plan(scenario, [(stage_list, sizes)], schedule=schedule)))


@st.composite
def replicated(draw: st.DrawFn) -> tuple[Scenario, Plan]:
    """Up to two pipelines of up to three stages of up to three replicas of unequal shares, in up to three regions."""
    layers = draw(st.integers(1, 4))
    pipelines = []
    devices = 0
    for _ in range(draw(st.integers(1, 2))):
        count = draw(st.integers(1, min(3, layers)))
        bounds = [*sorted(draw(st.permutations(range(1, layers)))[: count - 1]), layers]
        widths = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
        depths = sorted(draw(st.lists(st.integers(1, 5), min_size=count, max_size=count)), reverse=True)
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
        pipelines.append((list(zip(bounds, widths, depths, strict=True)), sizes))
        devices += sum(widths)
    regions = draw(st.lists(st.sampled_from("abc"), min_size=devices, max_size=devices))
    scenario = draw(meshes(devices, layers, sum(sum(sizes) for _, sizes in pipelines), regions))
    shares = draw(st.lists(st.floats(0.2, 5), min_size=devices, max_size=devices))
    # Sums after the last action, and sums of one layer or of several that overlap with backward.
    bucket_bytes = draw(st.sampled_from([0, 1, 6000]))
    synchronisation = Synchronisation(algorithm=draw(st.sampled_from(ALGORITHMS)), bucket_bytes=bucket_bytes)
    plan = draw(recomputing(layered_plan(scenario, pipelines, shares=shares)))
    return scenario, replace(plan, synchronisation=synchronisation, compression=draw(st.sampled_from(COMPRESSIONS)))


def in_order(plan: Plan, order: str) -> Plan:
    """The plan in one of `planner.plan.plan.ORDERS`; only what is scheduled can overlap with sums."""
    return replace(plan if order == "scheduled" else plan.without_overlap, order=order)


@st.composite
def short_traces(draw: st.DrawFn) -> LinkTrace:
    """A looping trace of a few pieces, outages among them, that a run goes round many times."""
    pieces = draw(st.lists(st.tuples(st.floats(0.5, 20), st.one_of(st.just(0.0), RATES_BPS)), min_size=1, max_size=5))
    lengths_s = [length_s for length_s, _ in pieces] + [draw(st.floats(0.5, 20))]
    rates_bps = [rate for _, rate in pieces] + [draw(RATES_BPS)]
    latencies_s = draw(st.lists(st.floats(0, 2), min_size=len(rates_bps), max_size=len(rates_bps)))
    edges_s = np.concatenate(([0.0], np.cumsum(lengths_s)))
    with_latency = draw(st.booleans())
    return LinkTrace(edges_s[:-1], np.array(rates_bps), float(edges_s[-1]), np.array(latencies_s) * with_latency)


def with_links(scenario: Scenario, links: Sequence[Link]) -> Scenario:
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, tuple(links)))


def swaying(link: Link, trace: LinkTrace) -> Link:
    """The link with a trace, whose mean it declares."""
    assert trace.latency_s is not None
    return replace(link, bandwidth_bps=trace.mean_bps, latency_s=float(trace.latency_s.mean()), trace=trace)


@st.composite
def on_shared_links(draw: st.DrawFn, cases: st.SearchStrategy[tuple[Scenario, Plan]]) -> tuple[Scenario, Plan]:
    """The case with a link for each ordered pair of regions, and one inside each, which all pairs of devices share."""
    scenario, plan = draw(cases)
    regions = scenario.cluster.regions
    links = [Link(source, target, draw(RATES_BPS), draw(TIMES_S)) for source in regions for target in regions]
    return with_links(scenario, links), plan


@st.composite
def on_traces(draw: st.DrawFn, cases: st.SearchStrategy[tuple[Scenario, Plan]]) -> tuple[Scenario, Plan]:
    """The case with traces on some of its links."""
    scenario, plan = draw(cases)
    links = [
        swaying(link, draw(short_traces())) if draw(st.booleans()) else link for link in scenario.cluster.links[:8]
    ]
    return with_links(scenario, [*links, *scenario.cluster.links[8:]]), plan


@st.composite
def with_packets(draw: st.DrawFn, cases: st.SearchStrategy[tuple[Scenario, Plan]]) -> tuple[Scenario, Plan]:
    """The case with jitter and losses on its links."""
    scenario, plan = draw(cases)
    jitter_s, loss = st.just(0.0) | st.floats(1e-3, 2), st.just(0.0) | st.floats(1e-6, 0.5)
    links = [replace(link, jitter_s=draw(jitter_s), loss=draw(loss)) for link in scenario.cluster.links[:8]]
    return with_links(scenario, [*links, *scenario.cluster.links[8:]]), plan


@st.composite
def network_effects(draw: st.DrawFn) -> NetworkEffects:
    return NetworkEffects(
        share=draw(st.floats(0.3, 1)),
        payload_efficiency=draw(st.floats(0.5, 1)),
        window_bytes=draw(st.one_of(st.just(float("inf")), st.floats(100, 1e5))),
        ready_notice=draw(st.booleans()),
        cold_start=draw(st.booleans()),
        initial_window_bytes=draw(st.floats(50, 2e4)),
    )


@st.composite
def compute_effects(draw: st.DrawFn, devices: Sequence[str]) -> ComputeEffects:
    """Everything but blocking transfers."""
    some = st.lists(st.sampled_from(sorted(devices)), unique=True, max_size=len(devices))
    speeds = st.floats(0.1, 3)
    return ComputeEffects(
        launch_overhead_s=draw(st.floats(0, 0.1)),
        jitter=draw(st.one_of(st.just(0.0), st.floats(0.01, 1))),
        seed=draw(st.integers(0, 2**32)),
        stragglers=tuple(Straggler(name, draw(st.floats(0.3, 3))) for name in draw(some)),
        slowdowns=tuple(
            Slowdown(
                name, (0.0, draw(st.floats(0.1, 10)), 20.0), (draw(speeds), draw(st.just(0.0) | speeds), draw(speeds))
            )
            for name in draw(some)
        ),
    )


@st.composite
def with_effects(draw: st.DrawFn, cases: st.SearchStrategy[tuple[Scenario, Plan]]) -> tuple[Scenario, Plan]:
    scenario, plan = draw(cases)
    effects = Effects(draw(network_effects()), draw(compute_effects(plan.devices)))
    return replace(scenario, effects=effects), plan


@st.composite
def with_faults(draw: st.DrawFn, cases: st.SearchStrategy[tuple[Scenario, Plan]]) -> tuple[Scenario, Plan]:
    """Devices and links fail up to two times each, and always come back."""
    scenario, plan = draw(cases)
    faults: list[Fault] = []
    for place in (*plan.devices, *scenario.cluster.links):
        time_s = 0.0
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
            start_s = time_s + draw(st.floats(0, 40))
            time_s = start_s + draw(st.floats(0.1, 20))
            if isinstance(place, Link):
                faults.append(LinkOutage(place.name, start_s, time_s))
            else:
                faults.append(draw(st.sampled_from([Absence, Hang]))(place, start_s, time_s))
    return replace(scenario, faults=tuple(draw(st.permutations(faults)))), plan


@st.composite
def without_waiting(draw: st.DrawFn, cases: st.SearchStrategy[tuple[Scenario, Plan]]) -> tuple[Scenario, Plan]:
    """Pipelines that send each other updates, where there are several."""
    scenario, plan = draw(cases)
    if len(plan.pipelines) == 1:
        return scenario, plan
    method = draw(st.sampled_from(["asgd", "asgd-ga", "ma"]))
    every = 1 if method == "asgd" else draw(st.integers(1, 3))
    bound = draw(st.none() | st.integers(0, 2))
    algorithm = plan.synchronisation.algorithm
    synchronisation = Synchronisation(method, algorithm, every, bound)
    return scenario, replace(plan, synchronisation=synchronisation)
