"""Transfers that block compute, by hand, and in the evaluator and the simulator."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.events.event import EventKind
from planner.plan.plan import Plan
from planner.scenario.cluster import Link
from planner.scenario.effects import ComputeEffects, NetworkEffects
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, makespan_s, mesh_scenario
from tests.helpers.scenarios.effect_runs import BY_EVENTS, EXACT, computed, run, sends, with_compute, with_network
from tests.helpers.strategies.run_strategies import chains, replicated, with_links


def test_sender_and_receiver_do_nothing_else_during_a_transfer() -> None:
    # A transfer lasts 1 s and arrives 0.5 s later; without blocking this is a test of the simulator's whole log.
    scenario = chain_scenario([1.0, 2.0], [2.0, 4.0], bandwidth_bps=8000.0, latency_s=0.5, global_batch=2)
    plan = chain_plan(scenario)
    blocked = run(with_compute(scenario, ComputeEffects(transfers_block=True)), plan)
    # The sender goes on when its message has left, until 2 s and 4 s.
    assert computed(blocked, "F", "device-0") == [(0.0, 1.0), (2.0, 3.0)]
    # The second message was there long ago, but it takes its 1.5 s from 9.5 s on, when the gradient has left.
    assert computed(blocked, "F", "device-1") == [(2.5, 4.5), (11.0, 13.0)]
    assert computed(blocked, "B", "device-1") == [(4.5, 8.5), (13.0, 17.0)]
    assert computed(blocked, "B", "device-0") == [(10.0, 12.0), (18.5, 20.5)]
    free = run(scenario, plan)
    assert computed(free, "F", "device-0") == [(0.0, 1.0), (1.0, 2.0)]
    assert computed(free, "F", "device-1") == [(2.5, 4.5), (8.5, 10.5)]


@settings(max_examples=150)
@given(st.one_of(chains(), replicated()), st.booleans(), st.sampled_from([NetworkEffects(), BY_EVENTS]))
def test_evaluator_and_simulator_agree_on_transfers_that_block(
    case: tuple[Scenario, Plan], blocks: bool, network: NetworkEffects
) -> None:
    scenario, plan = with_compute(case[0], ComputeEffects(transfers_block=blocks)), case[1]
    simulated_s = makespan_s(run(with_network(scenario, network), plan))
    assert step_time_s(plan, scenario) == pytest.approx(simulated_s, rel=EXACT)


@pytest.mark.parametrize(("blocks", "starts_s"), [(False, [0.0, 1.0]), (True, [0.0, 3.0])])
def test_on_a_shared_link_the_sender_waits_for_the_departure(blocks: bool, starts_s: list[float]) -> None:
    # Two senders with 4,000 bits each at 1 s have half of 4 kbit/s: until 3 s.
    scenario = mesh_scenario(
        4,
        [1.0, 0.0],
        [1.0, 0.0],
        output_bytes=[500, 0],
        parameter_bytes=[0, 0],
        global_batch=4,
        regions=["a", "b", "a", "b"],
    )
    links = [Link(source, target, 4000.0, 0.25) for source in "ab" for target in "ab"]
    stages = [(1, 1, 2), (2, 1, 1)]
    plan = layered_plan(scenario, [(stages, [1, 1]), (stages, [1, 1])])
    record = run(with_compute(with_links(scenario, links), ComputeEffects(transfers_block=blocks)), plan)
    for sender, receiver in (("device-0", "device-1"), ("device-2", "device-3")):
        assert [start_s for start_s, _ in computed(record, "F", sender)] == pytest.approx(starts_s, rel=EXACT)
        assert sends(record, device=sender)[0].end_s == pytest.approx(3.0, rel=EXACT)
        assert computed(record, "F", receiver)[0][0] == pytest.approx(3.25, rel=EXACT)


@pytest.mark.parametrize("network", [NetworkEffects(), BY_EVENTS])
def test_a_device_that_chooses_is_idle_while_it_sends(network: NetworkEffects) -> None:
    # 8,000 bits from 1 to 5 s, forward and backward until 7 s, and back from 7 to 11 s.
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], bandwidth_bps=2000.0, global_batch=1)
    scenario = with_network(with_compute(scenario, ComputeEffects(transfers_block=True)), network)
    record = run(scenario, replace(chain_plan(scenario), order="dynamic"))
    receives = [(e.device, e.start_s, e.end_s) for e in record.events if e.kind is EventKind.RECEIVE]
    assert receives == [("device-1", 0.0, 5.0), ("device-0", 1.0, 11.0)]
