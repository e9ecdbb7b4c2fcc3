"""Jitter and losses of packets in the simulator: the same by arithmetic and by events."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.network import jitter_delay_s, loss_ceiling_bps
from planner.events.event import Event, EventKind
from planner.plan.plan import Plan
from planner.scenario.cluster import Link
from planner.scenario.effects import Effects, NetworkEffects
from planner.scenario.scenario import Scenario
from planner.scenario.training import LearningRateSchedule, Optimizer
from planner.step.evaluate import step_time_s
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario
from tests.helpers.strategies.run_strategies import (
    chains,
    on_traces,
    replicated,
    with_effects,
    with_links,
    with_packets,
)
from traces.trace import LinkTrace

EXACT = 1e-9

# Slow start from a window that is never too small: every message passes through the kernel, and none takes longer.
BY_EVENTS = NetworkEffects(cold_start=True, initial_window_bytes=1e15)
WAYS = st.sampled_from([NetworkEffects(), BY_EVENTS])

SIZES_BYTES = st.integers(1, 100_000)
JITTERS_S = st.floats(1e-3, 1)


def two_stages(link: Link, sizes: list[int], network: NetworkEffects) -> tuple[Scenario, Plan]:
    """Device 0 hands messages of so many bytes over at once, at 0 s; device 1 computes for 1 s on each, first things
    first."""
    scenario = mesh_scenario(
        2,
        [0.0, 1.0],
        [0.0, 0.0],
        output_bytes=[1, 0],
        parameter_bytes=[0, 0],
        global_batch=sum(sizes),
        regions=["a", "b"],
    )
    back = replace(link, source="b", target="a", trace=None)
    scenario = with_links(replace(scenario, effects=Effects(network)), [link, back])
    return scenario, layered_plan(scenario, [([(1, 1, len(sizes)), (2, 1, len(sizes))], sizes)], schedule="gpipe")


def of_kind(scenario: Scenario, plan: Plan, kind: EventKind, device: str) -> list[Event]:
    events = Simulator().run(scenario, plan, None, 1).events
    found = [event for event in events if event.kind is kind and event.device == device and event.action == "F"]
    return sorted(found, key=lambda event: event.microbatch)


TRACE = LinkTrace(np.array([0.0, 5.0]), np.array([2e4, 8e4]), 10.0)
SWAYING = LinkTrace(np.array([0.0, 5.0]), np.array([2e4, 8e4]), 10.0, np.array([0.5, 2.0]))


@settings(max_examples=80)
@given(SIZES_BYTES, JITTERS_S, st.sampled_from([None, TRACE, SWAYING]), WAYS)
def test_the_last_byte_arrives_later_on_every_kind_of_line(
    size_bytes: int, jitter_s: float, trace: LinkTrace | None, network: NetworkEffects
) -> None:
    arrivals_s = []
    for each_s in (0.0, jitter_s):
        link = Link("a", "b", 5e4, 0.25, trace, jitter_s=each_s)
        (received,) = of_kind(*two_stages(link, [size_bytes], network), EventKind.RECEIVE, "device-1")
        arrivals_s.append(received.end_s)
    frames = math.ceil(size_bytes / 1448)
    assert arrivals_s[1] - arrivals_s[0] == pytest.approx(jitter_s * frames / (frames + 1), rel=1e-6)


@pytest.mark.parametrize("network", [NetworkEffects(), BY_EVENTS])
def test_a_small_message_does_not_overtake_a_large_one(network: NetworkEffects) -> None:
    # 100 frames leave at 1.16 s and a single one right behind; the small one's own jitter would be half of 10 s.
    link = Link("a", "b", 1e6, 0.0, jitter_s=10.0)
    scenario, plan = two_stages(link, [144_800, 1], network)
    starts_s = [event.start_s for event in of_kind(scenario, plan, EventKind.COMPUTE, "device-1")]
    there_s = 8 * 144_800 / 1e6 + 1000 / 101
    assert starts_s[0] == pytest.approx(there_s)
    # It takes 144,800 samples of a second each.
    assert starts_s[1] == pytest.approx(there_s + 144_800)
    received = of_kind(scenario, plan, EventKind.RECEIVE, "device-1")
    assert [event.end_s for event in received] == pytest.approx([there_s])


@settings(max_examples=80)
@given(
    SIZES_BYTES,
    st.floats(1e-4, 0.5),
    st.floats(0.01, 2),
    st.integers(1, 8),
    st.one_of(st.just(math.inf), st.floats(100, 1e5)),
    st.sampled_from([True, False]),
)
def test_a_message_goes_no_faster_than_losses_let_its_connections(
    size_bytes: int, loss: float, latency_s: float, connections: int, window_bytes: float, by_events: bool
) -> None:
    network = replace(BY_EVENTS if by_events else NetworkEffects(), window_bytes=window_bytes, payload_efficiency=0.9)
    link = Link("a", "b", 1e6, latency_s, loss=loss)
    scenario, plan = two_stages(link, [size_bytes], network)
    plan = replace(plan, connections=connections)
    (sent,) = of_kind(scenario, plan, EventKind.SEND, "device-0")
    mathis_bps = 8 * 1448 / (2 * latency_s) * math.sqrt(1.5) / math.sqrt(loss)
    window_bps = 8 * window_bytes / (2 * latency_s)
    expected_s = 8 * size_bytes / min(0.9e6, connections * mathis_bps, connections * window_bps)
    assert sent.end_s - sent.start_s == pytest.approx(expected_s, rel=EXACT)
    assert mathis_bps == pytest.approx(loss_ceiling_bps(loss, 2 * latency_s))


def test_a_packet_must_pass_all_links_of_a_path() -> None:
    # Three regions in a row: a packet is lost on the first or on the second link, or on none of them.
    scenario = mesh_scenario(
        2, [0.0, 1.0], [0.0, 0.0], output_bytes=[100_000, 0], parameter_bytes=[0, 0], global_batch=1, regions=["a", "c"]
    )
    middle = replace(scenario.cluster.devices[0], name="device-2", region="b")
    devices = (*scenario.cluster.devices, middle)
    links = tuple(
        Link(*ends, 1e9, 0.1, jitter_s=0.25, loss=loss)
        for ends, loss in ((("a", "b"), 0.1), (("b", "c"), 0.2), (("c", "b"), 0.9), (("b", "a"), 0.9))
    )
    scenario = replace(scenario, cluster=replace(scenario.cluster, devices=devices, links=links))
    plan = layered_plan(scenario, [([(1, 1, 1), (2, 1, 1)], [1])])
    (received,) = of_kind(scenario, plan, EventKind.RECEIVE, "device-1")
    # What the way back loses is acknowledgements, of which a later one does as well.
    occupied_s = 800_000 / loss_ceiling_bps(1 - 0.9 * 0.8, 0.4)
    assert received.end_s == pytest.approx(occupied_s + 0.2 + jitter_delay_s(0.5, 100_000))


@settings(max_examples=60)
@given(with_packets(st.one_of(chains(), on_traces(chains()), replicated())), st.booleans())
def test_arithmetic_and_events_agree(case: tuple[Scenario, Plan], blocks: bool) -> None:
    scenario, plan = case
    ends_s = []
    for network in (NetworkEffects(), BY_EVENTS):
        compute = replace(scenario.effects.compute, transfers_block=blocks)
        chosen = replace(scenario, effects=replace(scenario.effects, network=network, compute=compute))
        log = Simulator().run(chosen, plan, None, 2).events
        ends_s.append(max(event.end_s for event in log))
    assert ends_s[0] == pytest.approx(ends_s[1], rel=1e-7)


@settings(max_examples=30)
@given(with_packets(with_effects(chains())))
def test_what_only_training_knows_changes_no_event(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    optimizer = Optimizer("sgd", 0.5, schedule=LearningRateSchedule("cosine", 3, 10, 0.1))
    training = replace(
        scenario.training, optimizer=optimizer, precision="bf16", clip_norm=1.0, noise_scale=True, seed=3
    )
    other = replace(scenario, training=training)
    assert Simulator().run(other, plan, None, 2).events == Simulator().run(scenario, plan, None, 2).events
    assert step_time_s(plan, other) == step_time_s(plan, scenario)


def test_jitter_and_losses_make_a_step_longer() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], output_bytes=[4000, 0], bandwidth_bps=1e6, latency_s=0.05)
    plan = chain_plan(scenario)
    times_s = []
    for jitter_s, loss in ((0.0, 0.0), (0.1, 0.0), (0.1, 0.5)):
        links = [replace(link, jitter_s=jitter_s, loss=loss) for link in scenario.cluster.links]
        times_s.append(step_time_s(plan, with_links(scenario, links)))
    assert times_s[0] < times_s[1] < times_s[2]
