"""What helps must not hurt: where that is a theorem it is held exactly, where it is not, to the bound that is one.

With a fixed order and links that no two pairs share, every start is a maximum of sums of durations, so that nothing
that is quicker can make anything later. Choosing devices and shared links are schedulers themselves and know
anomalies (Graham, Bounds on multiprocessing timing anomalies, 1969).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan.plan import Plan
from planner.scenario.cluster import Link
from planner.scenario.effects import ComputeEffects, Effects, NetworkEffects, Slowdown, Straggler
from planner.scenario.faults import Absence, Hang, LinkOutage
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from planner.step.compile import compile_step
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, makespan_s, mesh_scenario
from tests.helpers.strategies.run_strategies import chains, in_order, on_shared_links, on_traces, replicated, with_links

EXACT = 1e-9
BASE = st.one_of(chains(), replicated())
# Something gets better, or stays.
GROWTH = st.one_of(st.just(1.0), st.floats(1, 4))
Case = tuple[Scenario, Plan]


def simulated_s(scenario: Scenario, plan: Plan, steps: int = 1) -> float:
    return makespan_s(Simulator().run(scenario, plan, None, steps))


@st.composite
def better_links(draw: st.DrawFn, scenario: Scenario) -> Scenario:
    """More bandwidth in every piece of every trace, less latency."""
    return with_links(scenario, [better_link(draw, link) for link in scenario.cluster.links])


def better_link(draw: st.DrawFn, link: Link) -> Link:
    faster = replace(link, latency_s=link.latency_s / draw(GROWTH), bandwidth_bps=link.bandwidth_bps * draw(GROWTH))
    if link.trace is None:
        return faster
    pieces = len(link.trace.times_s)
    growth = np.array(draw(st.lists(GROWTH, min_size=pieces, max_size=pieces)))
    # An outage can end as well.
    more_bps = np.array(draw(st.lists(st.sampled_from([0.0, 1e5]), min_size=pieces, max_size=pieces)))
    trace = replace(link.trace, bandwidth_bps=link.trace.bandwidth_bps * growth + more_bps)
    return replace(faster, trace=trace, bandwidth_bps=trace.mean_bps)


def without_latency_traces(scenario: Scenario) -> Scenario:
    """Where the latency of a link falls, a message that leaves later can arrive earlier: that is no anomaly."""
    return with_links(
        scenario,
        [
            replace(link, trace=replace(link.trace, latency_s=None)) if link.trace is not None else link
            for link in scenario.cluster.links
        ],
    )


@st.composite
def hampered(draw: st.DrawFn, cases: st.SearchStrategy[Case]) -> Case:
    """The case with effects and faults on some of its devices and links."""
    scenario, plan = draw(cases)
    some = st.lists(st.sampled_from(plan.devices), unique=True, max_size=3)
    compute = ComputeEffects(
        launch_overhead_s=draw(st.floats(0, 0.5)),
        jitter=draw(st.sampled_from([0.0, 0.5])),
        stragglers=tuple(Straggler(name, draw(st.floats(0.5, 4))) for name in draw(some)),
        slowdowns=tuple(
            Slowdown(name, (0.0, 5.0, 9.0), (0.5, draw(st.sampled_from([0.0, 2.0])), 1.0)) for name in draw(some)
        ),
    )
    network = NetworkEffects(
        payload_efficiency=draw(st.floats(0.3, 1)),
        window_bytes=draw(st.sampled_from([math.inf, 1e3])),
        ready_notice=draw(st.booleans()),
    )
    gone = [Absence(name, draw(st.floats(0, 50)), 50 + draw(st.floats(1, 50))) for name in draw(some)]
    hung = [Hang(name, draw(st.floats(200, 250)), 250 + draw(st.floats(1, 50))) for name in draw(some)]
    links = [link.name for link in scenario.cluster.links]
    out = [LinkOutage(name, 10.0, 10 + draw(st.floats(1, 90))) for name in links if draw(st.booleans())]
    return replace(scenario, effects=Effects(network, compute), faults=(*gone, *hung, *out)), plan


@st.composite
def relieved(draw: st.DrawFn, scenario: Scenario) -> Scenario:
    """Less of every effect, and fewer faults."""
    compute, network = scenario.effects.compute, scenario.effects.network
    lighter = replace(
        compute,
        launch_overhead_s=compute.launch_overhead_s / draw(GROWTH),
        stragglers=tuple(replace(each, factor=each.factor / draw(GROWTH)) for each in compute.stragglers),
        slowdowns=tuple(
            replace(each, speed=tuple(speed * draw(GROWTH) for speed in each.speed)) for each in compute.slowdowns
        ),
    )
    wider = replace(
        network,
        payload_efficiency=min(1.0, network.payload_efficiency * draw(GROWTH)),
        window_bytes=network.window_bytes * draw(GROWTH),
        ready_notice=network.ready_notice and draw(st.booleans()),
    )
    faults = tuple(fault for fault in scenario.faults if draw(st.booleans()))
    return replace(scenario, effects=Effects(wider, lighter), faults=faults)


# --- fixed orders, links of one's own: exactly ----------------------------------------------------------------


@settings(max_examples=60)
@given(hampered(st.one_of(BASE, on_traces(BASE))), st.data())
def test_with_a_fixed_order_nothing_that_helps_makes_anything_later(case: Case, data: st.DataObject) -> None:
    scenario, plan = without_latency_traces(case[0]), case[1]
    better = data.draw(relieved(data.draw(better_links(scenario))))
    before, after = (Simulator().run(each, plan, None, steps=2).events for each in (scenario, better))
    ends_s = [
        {
            (e.kind, e.device, e.peer, e.action, e.stage, e.microbatch, e.step, e.size_bytes): e.end_s
            for e in events
            if e.kind in ("compute", "send")
        }
        for events in (before, after)
    ]
    assert ends_s[0].keys() == ends_s[1].keys()
    late = {what: end_s for what, end_s in ends_s[1].items() if end_s > ends_s[0][what] * (1 + EXACT) + EXACT}
    assert not late


@settings(max_examples=60)
@given(chains(), st.data())
def test_blocking_transfers_leave_it_so_on_steady_links(case: Case, data: st.DataObject) -> None:
    scenario = replace(case[0], effects=Effects(compute=ComputeEffects(transfers_block=True)))
    better = data.draw(better_links(scenario))
    assert simulated_s(better, case[1]) <= simulated_s(scenario, case[1]) * (1 + EXACT)


# --- shared links and devices that choose: within bounds ------------------------------------------------------


# Powers of two: other factors round, and two things of one moment then come one after the other, which a device that
# chooses sees.
@settings(max_examples=60)
@given(
    st.one_of(BASE, on_shared_links(replicated())),
    st.sampled_from(["scheduled", "dynamic"]),
    st.sampled_from([0.125, 0.25, 0.5, 2.0, 4.0, 8.0]),
)
def test_all_faster_by_one_factor_is_faster_by_that_factor(case: Case, order: str, factor: float) -> None:
    scenario, plan = case[0], in_order(case[1], order)
    links = [
        replace(link, bandwidth_bps=link.bandwidth_bps * factor, latency_s=link.latency_s / factor)
        for link in scenario.cluster.links
    ]
    faster = replace(with_links(scenario, links), model=quicker(scenario.model, factor))
    assert simulated_s(faster, plan) == pytest.approx(simulated_s(scenario, plan) / factor, rel=1e-7)


def quicker(model: ModelProfile, factor: float) -> ModelProfile:
    def sped_up(times_s: Sequence[float]) -> tuple[float, ...]:
        return tuple(time_s / factor for time_s in times_s)

    return ModelProfile(
        model.name,
        tuple(
            replace(
                layer,
                times={
                    kind: replace(
                        table,
                        forward_s=sped_up(table.forward_s),
                        backward_input_s=sped_up(table.backward_input_s),
                        backward_weight_s=sped_up(table.backward_weight_s),
                    )
                    for kind, table in layer.times.items()
                },
            )
            for layer in model.layers
        ),
    )


@settings(max_examples=60)
@given(st.one_of(BASE, on_shared_links(replicated())), st.sampled_from(["scheduled", "dynamic"]), st.data())
def test_what_helps_hurts_at_most_by_the_number_of_devices_and_links(
    case: Case, order: str, data: st.DataObject
) -> None:
    # Graham's 2 - 1/m is for machines of which any can do any job; here each action has its device and each message
    # its path. What holds for those: as long as a step lasts, something works, a device or (without latency) a link
    # at its full rate. So it lasts no longer than all of their work one after the other, which what helps only
    # shortens; and no shorter than the work of any one of them.
    scenario, plan = case[0], in_order(case[1], order)
    scenario = with_links(scenario, [replace(link, latency_s=0.0) for link in scenario.cluster.links])
    better = data.draw(better_links(scenario))
    after_s, works_s = simulated_s(better, plan), loads_s(better, plan)
    assert after_s <= sum(works_s) * (1 + EXACT)
    assert after_s <= len(works_s) * simulated_s(scenario, plan) * (1 + EXACT)


def loads_s(scenario: Scenario, plan: Plan) -> list[float]:
    """Seconds of work of each device and link that has any."""
    step = compile_step(plan, scenario)
    devices = np.bincount(step.actions.actor, step.actions.duration_s).tolist()
    links = dict.fromkeys((link.name for link in scenario.cluster.links), 0.0)
    sizes = step.messages.size_bytes.tolist()
    for channel, size_bytes in zip(step.graph.channel.tolist(), sizes, strict=True):
        ends = (step.graph.channel_sender[channel], step.graph.channel_receiver[channel])
        for link in scenario.cluster.path(*(step.actors[end] for end in ends)):
            links[link.name] += 8 * size_bytes / link.bandwidth_bps
    return [load_s for load_s in (*devices, *links.values()) if load_s > 0]


def test_a_quicker_device_can_delay_a_step_over_a_shared_link() -> None:
    # Two pipelines over one link that takes 10 s for a message. Where device-2 is slow, its message sets out when that
    # of device-0 is through; where it is not, both share the link, and the long work of device-1 begins later.
    scenario = mesh_scenario(
        4,
        [1.0, 20.0],
        [1.0, 1.0],
        output_bytes=[10_000, 0],
        parameter_bytes=[0, 0],
        global_batch=2,
        regions=["a", "b", "a", "b"],
    )
    scenario = with_links(scenario, [Link("a", "b", 8000.0, 0.0), Link("b", "a", 8e9, 0.0)])
    plan = layered_plan(scenario, [([(1, 1, 1), (2, 1, 1)], [1])] * 2)

    def with_factors(first: float, second: float) -> float:
        stragglers = (Straggler("device-2", first), Straggler("device-3", second))
        return simulated_s(replace(scenario, effects=Effects(compute=ComputeEffects(stragglers=stragglers))), plan)

    # 1 s, 10 s on the link, 20 s and 1 s there, 1 s after the way back; the other pipeline is through before.
    assert with_factors(11.0, 0.01) == pytest.approx(33.0, abs=0.01)
    assert with_factors(1.0, 0.01) == pytest.approx(43.0, abs=0.01)


# --- jitter ---------------------------------------------------------------------------------------------------

SEEDS = 300


def jittered(scenario: Scenario, seed: int, jitter: float = 0.3) -> Scenario:
    return replace(scenario, effects=Effects(compute=ComputeEffects(jitter=jitter, seed=seed)))


def mean_and_error(scenario: Scenario, plan: Plan) -> tuple[float, float]:
    makespans_s = [simulated_s(jittered(scenario, seed), plan) for seed in range(SEEDS)]
    return float(np.mean(makespans_s)), float(np.std(makespans_s, ddof=1)) / math.sqrt(SEEDS)


def unequal_chain() -> Case:
    scenario = chain_scenario([1.0, 2.0, 1.5], [2.0, 3.0, 2.0], bandwidth_bps=1e4, latency_s=0.3)
    return scenario, chain_plan(scenario)


def replicas() -> Case:
    scenario = mesh_scenario(4, [1.0, 2.0], [1.0, 2.0], link=lambda a, b: (1e5, 0.1), global_batch=8)
    return scenario, layered_plan(scenario, [([(1, 2, 2), (2, 2, 1)], [2] * 4)])


@pytest.mark.parametrize("case", [unequal_chain, replicas])
def test_jitter_costs_a_fixed_order_time_in_the_mean(case: object) -> None:
    # A makespan is the longest of sums of durations, a convex function of them: by Jensen's inequality its mean is
    # not below the makespan of the means. With several devices it is above by far more than chance.
    scenario, plan = case()  # type: ignore[operator]
    mean_s, error_s = mean_and_error(scenario, plan)
    assert mean_s - 4 * error_s > simulated_s(scenario, plan)


def test_jitter_costs_a_single_device_nothing_in_the_mean() -> None:
    # A sum is linear.
    scenario = chain_scenario([1.0], [2.0])
    plan = chain_plan(scenario)
    mean_s, error_s = mean_and_error(scenario, plan)
    assert 0 < error_s < 0.01 * mean_s
    assert mean_s == pytest.approx(simulated_s(scenario, plan), abs=4 * error_s)


@settings(max_examples=20)
@given(st.one_of(BASE, on_shared_links(replicated())), st.integers(0, 2**63), st.sampled_from(["scheduled", "dynamic"]))
def test_the_same_seed_gives_the_same_log_and_another_one_another(case: Case, seed: int, order: str) -> None:
    scenario, plan = case[0], in_order(case[1], order)
    first, again, other = (
        Simulator().run(jittered(scenario, each), plan, None, steps=2).events for each in (seed, seed, seed + 1)
    )
    assert first == again
    assert first != other
