from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from planner.adapt.adaptation import Adaptation
from planner.adapt.observation import Observation
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.events.event import PROBE_ACTION, Event, EventKind
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, makespan_s, mesh_scenario
from traces.common.errors import InputError, RunError
from traces.trace import LinkTrace


class Idle:
    """Never changes a thing; remembers which steps it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        self.seen.append(observation.step)
        return None


class Once:
    """Changes to one plan after one step."""

    def __init__(self, step: int, plan: Plan) -> None:
        self._step, self._plan = step, plan

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        return self._plan if observation.step == self._step else None


def swaying() -> tuple[Scenario, Plan]:
    """A chain over a link that drops to a tenth, and comes back."""
    trace = LinkTrace(np.array([0.0, 30.0, 120.0]), np.array([1e6, 2e4, 1e6]), 150.0)
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], output_bytes=[5000, 0], bandwidth_bps=trace.mean_bps, trace=trace)
    return scenario, chain_plan(scenario, microbatches=[4, 4])


def test_the_whole_log_of_two_stages_and_two_microbatches() -> None:
    # A transfer lasts 1 s (1,000 bytes at 8 kbit/s) and arrives 0.5 s later.
    scenario = chain_scenario([1.0, 2.0], [2.0, 4.0], bandwidth_bps=8000.0, latency_s=0.5, global_batch=2)
    record = Simulator().run(scenario, chain_plan(scenario), None, steps=1)
    compute, send, receive = EventKind.COMPUTE, EventKind.SEND, EventKind.RECEIVE
    assert record.events == (
        Event(compute, "device-0", "", 0, 0, 0, 0, "F", 0.0, 1.0, 0),
        Event(receive, "device-1", "device-0", 0, 1, 0, 0, "F", 0.0, 2.5, 1000),
        Event(compute, "device-0", "", 0, 0, 1, 0, "F", 1.0, 2.0, 0),
        Event(send, "device-0", "device-1", 0, 0, 0, 0, "F", 1.0, 2.0, 1000, arrived_s=2.5),
        Event(send, "device-0", "device-1", 0, 0, 1, 0, "F", 2.0, 3.0, 1000, arrived_s=3.5),
        Event(receive, "device-0", "device-1", 0, 0, 0, 0, "B", 2.0, 10.0, 1000),
        Event(compute, "device-1", "", 0, 1, 0, 0, "F", 2.5, 4.5, 0),
        Event(compute, "device-1", "", 0, 1, 0, 0, "B", 4.5, 8.5, 0),
        Event(send, "device-1", "device-0", 0, 1, 0, 0, "B", 8.5, 9.5, 1000, arrived_s=10.0),
        Event(compute, "device-1", "", 0, 1, 1, 0, "F", 8.5, 10.5, 0),
        Event(compute, "device-0", "", 0, 0, 0, 0, "B", 10.0, 12.0, 0),
        Event(compute, "device-1", "", 0, 1, 1, 0, "B", 10.5, 14.5, 0),
        Event(receive, "device-0", "device-1", 0, 0, 1, 0, "B", 12.0, 16.0, 1000),
        Event(send, "device-1", "device-0", 0, 1, 1, 0, "B", 14.5, 15.5, 1000, arrived_s=16.0),
        Event(compute, "device-0", "", 0, 0, 1, 0, "B", 16.0, 18.0, 0),
    )
    assert (record.backend, record.decisions, record.losses) == ("simulated", (), ())


def test_the_whole_log_of_a_gradient_sum() -> None:
    # 8 numbers of 4 bytes: each device sends two chunks of 16 bytes, 1 s each at 128 bit/s.
    scenario = mesh_scenario(2, [1.0], [1.0], parameter_bytes=[32], link=lambda a, b: (128.0, 0.25), global_batch=2)
    record = Simulator().run(scenario, layered_plan(scenario, [([(1, 2, 1)], [2])]), None, steps=1)
    names = ("device-0", "device-1")
    assert record.events == (
        *(Event(EventKind.COMPUTE, name, "", 0, 0, 0, 0, "F", 0.0, 1.0, 0) for name in names),
        *(Event(EventKind.COMPUTE, name, "", 0, 0, 0, 0, "B", 1.0, 2.0, 0) for name in names),
        *(Event(EventKind.SEND, a, b, 0, 0, -1, 0, "S", 2.0, 3.0, 16, arrived_s=3.25) for a, b in (names, names[::-1])),
        *(Event(EventKind.SYNC, name, "", 0, 0, -1, 0, "S", 2.0, 4.5, 32) for name in names),
        *(
            Event(EventKind.SEND, a, b, 0, 0, -1, 0, "S", 3.25, 4.25, 16, arrived_s=4.5)
            for a, b in (names, names[::-1])
        ),
    )


def test_a_device_begins_the_next_step_while_others_still_sum_gradients() -> None:
    # The second stage sums 8,000 bytes (16 s for two rounds at 4 kbit/s); the first goes on meanwhile.
    scenario = mesh_scenario(
        3,
        [1.0, 1.0],
        [1.0, 1.0],
        output_bytes=[0, 0],
        parameter_bytes=[0, 8000],
        link=lambda a, b: (4000.0, 0.0),
        global_batch=2,
    )
    plan = layered_plan(scenario, [([(1, 1, 1), (2, 2, 1)], [2])])
    events = Simulator().run(scenario, plan, None, steps=2).events
    sums = [(e.step, e.start_s, e.end_s) for e in events if e.kind is EventKind.SYNC]
    # 2 samples take the first stage 2 s each way, a replica of the second, with one sample each, 1 s.
    assert sums == [(0, 4.0, 20.0)] * 2 + [(1, 22.0, 38.0)] * 2
    first = [(e.step, e.action, e.start_s) for e in events if e.kind is EventKind.COMPUTE and e.device == "device-0"]
    assert first == [(0, "F", 0.0), (0, "B", 4.0), (1, "F", 6.0), (1, "B", 22.0)]


def test_an_idle_policy_sees_each_step_once_and_adds_only_probes() -> None:
    scenario, plan = swaying()
    policy = Idle()
    watched = Simulator().run(scenario, plan, policy, steps=6)
    assert policy.seen == list(range(6))
    probes = [event for event in watched.events if event.action == PROBE_ACTION]
    assert {(event.device, event.peer, event.step) for event in probes} == {
        (*ends, step) for ends in (("device-0", "device-1"), ("device-1", "device-0")) for step in range(6)
    }
    assert len(probes) == 12
    others = [event for event in watched.events if event.action != PROBE_ACTION]
    assert others == Simulator().run(scenario, plan, None, steps=6).events
    assert watched.decisions == ()


def test_a_link_at_zero_for_ever_ends_the_run_with_the_names_of_who_waits() -> None:
    trace = LinkTrace(np.array([0.0, 5.0]), np.array([8000.0, 0.0]), 6.0, loops=False)
    scenario = chain_scenario([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], bandwidth_bps=trace.mean_bps, trace=trace)
    with pytest.raises(RunError, match=r"at 8\.000 s: device-0, device-1, device-2 wait .* rate zero") as caught:
        Simulator().run(scenario, chain_plan(scenario), None, steps=1)
    assert not isinstance(caught.value, InputError)


def test_a_plan_that_does_not_fit_is_refused_before_anything_runs() -> None:
    scenario, plan = swaying()
    with pytest.raises(InputError, match="the plan is for model 'another'"):
        Simulator().run(scenario, replace(plan, model="another"), None, steps=1)


def test_a_decision_takes_effect_exactly_the_lag_later() -> None:
    scenario, plan = swaying()
    finer = plan.with_microbatches(0, (2, 2, 2, 2), (2, 1))
    record = Simulator().run(scenario, plan, Once(1, finer), steps=6)
    microbatches = defaultdict(set)
    for event in record.events:
        if event.kind is EventKind.COMPUTE:
            microbatches[event.step].add(event.microbatch)
    counts = [len(microbatches[step]) for step in range(6)]
    assert counts == [2] * (1 + DECISION_LAG_STEPS) + [4] * (5 - DECISION_LAG_STEPS)
    (decision,) = record.decisions
    assert (decision.observed_step, decision.first_step, decision.plan) == (1, 1 + DECISION_LAG_STEPS, finer)
    assert decision.change == "microbatches 2 -> 4"
    (noted,) = [event for event in record.events if event.kind is EventKind.DECISION]
    last_of_step = max(e.end_s for e in record.events if e.step == 1 and e.kind is EventKind.COMPUTE)
    assert (noted.step, noted.start_s, noted.end_s) == (1, last_of_step, last_of_step)


def test_a_policy_that_breaks_an_invariant_is_refused() -> None:
    scenario, plan = swaying()
    with pytest.raises(RunError, match=r"policy Once returned a plan that is not valid: .* add up to 4 samples"):
        Simulator().run(scenario, plan, Once(0, plan.with_microbatches(0, (4,), (1, 1))), steps=3)


def test_recorded_events_lead_a_fresh_policy_to_the_same_decisions() -> None:
    scenario, plan = swaying()
    record = Simulator().run(scenario, plan, make_policy("depth", scenario), steps=30)
    assert record.decisions
    policy = make_policy("depth", scenario)
    assert policy is not None
    adaptation = Adaptation(policy, plan, scenario)
    for step in range(30):
        adaptation.finish_step(step, record.events)
    assert tuple(adaptation.decisions) == record.decisions


def test_the_latency_of_a_trace_is_that_of_the_moment_a_message_has_left() -> None:
    trace = LinkTrace(np.array([0.0, 4.0]), np.array([8000.0, 8000.0]), 100.0, np.array([0.5, 3.0]))
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], latency_s=9.0, bandwidth_bps=8000.0, trace=trace, global_batch=1)
    record = Simulator().run(scenario, chain_plan(scenario), None, steps=1)
    arrivals = [event.end_s for event in record.events if event.kind is EventKind.RECEIVE]
    # There: leaves from 1 to 2 s, 0.5 s on the way. Back: leaves from 4.5 to 5.5 s, 3 s on the way.
    assert arrivals == [2.5, 8.5]
    assert makespan_s(record) == 9.5


def test_links_that_never_carry_anything_end_the_run() -> None:
    dark = LinkTrace(np.array([0.0, 10.0]), np.zeros(2), 20.0)
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], trace=dark)
    with pytest.raises(RunError, match="wait for bytes that never arrive; does a link stay at rate zero"):
        Simulator().run(scenario, chain_plan(scenario), None, 1)
