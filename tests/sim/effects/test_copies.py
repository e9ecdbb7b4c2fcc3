"""Copies between GPU and host: by closed formulas, in the evaluators and the simulator, and nothing without them."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.events.event import Event
from planner.events.event import in_order as events_in_order
from planner.plan.plan import Plan
from planner.scenario.effects import NetworkEffects, TransportEffects
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.step.shared_links.step_time import shared_step_time_s
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, makespan_s
from tests.helpers.scenarios.effect_runs import BY_EVENTS, EXACT, computed, run, sends, with_network
from tests.helpers.strategies.run_strategies import chains, in_order, on_shared_links, replicated

SIZE_BYTES, MICROBATCHES = 1000, 6
SECONDS = st.floats(0.01, 4)


def rounded(events: Iterable[Event]) -> list[Event]:
    """Return the events in order, without the time of an immediate copy, which at second 0 is seen."""
    return events_in_order(
        replace(each, start_s=round(each.start_s, 12), end_s=round(each.end_s, 12), arrived_s=round(each.arrived_s, 12))
        for each in events
    )


def with_copies(scenario: Scenario, copy_bps: float) -> Scenario:
    transport = TransportEffects(copies=True, copy_bps=copy_bps)
    return replace(scenario, effects=replace(scenario.effects, transport=transport))


@given(SECONDS, SECONDS, SECONDS, st.sampled_from([NetworkEffects(), BY_EVENTS]), st.booleans())
def test_messages_pass_two_engines_and_the_link_as_a_pipeline(
    forward_s: float, sent_s: float, copy_s: float, network: NetworkEffects, dynamic: bool
) -> None:
    bits = 8 * SIZE_BYTES
    scenario = chain_scenario(
        [forward_s, 0.5], [0.0, 0.0], output_bytes=[SIZE_BYTES, 0], bandwidth_bps=bits / sent_s, latency_s=0.25
    )
    scenario = replace(scenario, training=replace(scenario.training, global_batch=MICROBATCHES))
    scenario = with_network(with_copies(scenario, bits / copy_s), network)
    plan = chain_plan(scenario, schedule="gpipe", depths=[MICROBATCHES] * 2)
    forwards = computed(run(scenario, in_order(plan, "dynamic") if dynamic else plan), "F", "device-1")
    # A flow shop of equal jobs: each station adds its time once, the slowest one once for each further job.
    first_s = forward_s + copy_s + sent_s + 0.25 + copy_s
    every_s = max(forward_s, copy_s, sent_s, 0.5)
    last_s = first_s + 0.5 + (MICROBATCHES - 1) * every_s
    assert forwards[0][0] == pytest.approx(first_s, rel=EXACT)
    assert forwards[-1][1] == pytest.approx(last_s, rel=EXACT)


def test_compute_goes_on_during_copies_and_an_engine_makes_one_copy_at_a_time() -> None:
    # Copies take 3 s, the link 1 s, a forward 1 s: the sender never waits, and its messages leave every 3 s.
    scenario = with_copies(
        chain_scenario([1.0, 1.0], [0.0, 0.0], output_bytes=[3000, 0], bandwidth_bps=24e3, global_batch=3), 8e3
    )
    record = run(scenario, chain_plan(scenario, schedule="gpipe", depths=[3, 3]))
    assert computed(record, "F", "device-0") == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    # Rows tell of the link: a send begins in the memory of the host.
    assert [(event.start_s, event.end_s) for event in sends(record)] == [(4.0, 5.0), (7.0, 8.0), (10.0, 11.0)]
    assert computed(record, "F", "device-1") == [(8.0, 9.0), (11.0, 12.0), (14.0, 15.0)]


@settings(max_examples=40)
@given(st.one_of(chains(), replicated()), st.floats(1e3, 1e6), st.sampled_from([NetworkEffects(), BY_EVENTS]))
def test_the_evaluator_and_the_simulator_agree(
    case: tuple[Scenario, Plan], copy_bps: float, network: NetworkEffects
) -> None:
    scenario, plan = with_copies(case[0], copy_bps), case[1]
    simulated_s = makespan_s(run(with_network(scenario, network), plan))
    assert step_time_s(plan, scenario) == pytest.approx(simulated_s, rel=EXACT)
    assert simulated_s >= makespan_s(run(case[0], plan)) * (1 - EXACT)


@settings(max_examples=20)
@given(on_shared_links(st.one_of(chains(), replicated())), st.floats(1e3, 1e6))
def test_they_agree_on_shared_links(case: tuple[Scenario, Plan], copy_bps: float) -> None:
    scenario, plan = with_copies(case[0], copy_bps), case[1]
    assert shared_step_time_s(plan, scenario) == pytest.approx(makespan_s(run(scenario, plan)), rel=1e-6)


@settings(max_examples=20)
@given(st.one_of(chains(), replicated()))
def test_a_run_without_copies_and_one_with_immediate_copies_have_equal_logs(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    log = run(scenario, plan, 2).events
    assert rounded(run(with_copies(scenario, 1e300), plan, 2).events) == rounded(log)
