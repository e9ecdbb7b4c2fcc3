"""Runs of a few messages in the simulator, with effects on network and compute."""

import math
from dataclasses import replace

from hypothesis import strategies as st

from planner.events.event import Event, EventKind
from planner.plan.plan import Plan
from planner.runs.record import RunRecord
from planner.scenario.cluster import Link
from planner.scenario.effects import ComputeEffects, NetworkEffects
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from tests.helpers.strategies.run_strategies import with_links
from traces.trace import LinkTrace

EXACT = 1e-9

SIZES_BYTES = st.integers(1, 100_000)
RATES_BPS = st.floats(1e3, 1e6)
SHARES = st.floats(0.1, 1)
WINDOWS_BYTES = st.one_of(st.just(math.inf), st.floats(100, 1e5))

# Slow start from a window that is never too small: every message passes through the kernel, and none takes longer.
BY_EVENTS = NetworkEffects(cold_start=True, initial_window_bytes=1e15)


def run(scenario: Scenario, plan: Plan, steps: int = 1) -> RunRecord:
    return Simulator().run(scenario, plan, None, steps)


def with_network(scenario: Scenario, network: NetworkEffects) -> Scenario:
    return replace(scenario, effects=replace(scenario.effects, network=network))


def with_compute(scenario: Scenario, compute: ComputeEffects) -> Scenario:
    return replace(scenario, effects=replace(scenario.effects, compute=compute))


def sends(record: RunRecord, action: str = "F", device: str = "device-0") -> list[Event]:
    """What a device sends for one kind of action, as it was handed over."""
    found = [e for e in record.events if e.kind is EventKind.SEND and (e.action, e.device) == (action, device)]
    return sorted(found, key=lambda event: event.start_s)


def computed(record: RunRecord, action: str, device: str) -> list[tuple[float, float]]:
    """Start and end of each of a device's actions of one kind."""
    own = (e for e in record.events if e.kind is EventKind.COMPUTE and (e.action, e.device) == (action, device))
    return [(event.start_s, event.end_s) for event in own]


def two_stages(
    size_bytes: int, rate_bps: float, *, messages: int = 1, there_s: float = 0.0, back_s: float = 0.0
) -> tuple[Scenario, Plan]:
    """Device 0 hands messages over at 1 s, 2 s, ..., with a latency of each way; the forwards go before the rest."""
    scenario = chain_scenario([1.0, 0.0], [1.0, 1.0], output_bytes=[size_bytes, 0], global_batch=messages)
    links = [Link("region-0", "region-1", rate_bps, there_s), Link("region-1", "region-0", rate_bps, back_s)]
    return with_links(scenario, links), chain_plan(scenario, schedule="gpipe", depths=[messages, messages])


def on_trace(scenario: Scenario, trace: LinkTrace) -> Scenario:
    there, back = scenario.cluster.links
    return with_links(scenario, [replace(there, bandwidth_bps=trace.mean_bps, trace=trace), back])
