"""Transfers that carry fewer bytes between regions, and only there."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.network import wire_bytes
from planner.cost.stage import scheduling_problem
from planner.events.event import SYNC_ACTION, UPDATE_ACTION, Event, EventKind
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.scenario.training import COMPRESSIONS
from planner.step.evaluate import step_time_s
from planner.step.orders import with_schedule
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from tests.helpers.strategies.run_strategies import on_shared_links, replicated, without_waiting


def test_sizes_by_hand() -> None:
    # Three samples of ten numbers each.
    assert [wire_bytes(each, 3, 40, 4) for each in COMPRESSIONS] == [120, 60, 3 * (10 + 4)]
    # Ten numbers of half precision: bf16 changes nothing.
    assert [wire_bytes(each, 3, 20, 2) for each in COMPRESSIONS] == [60, 60, 3 * (10 + 4)]
    # Nothing stays nothing, and what is left of a last number counts as a whole one.
    assert [wire_bytes(each, 3, 0, 4) for each in COMPRESSIONS] == [0, 0, 0]
    assert [wire_bytes(each, 1, 41, 4) for each in COMPRESSIONS] == [41, 22, 15]


@given(
    st.sampled_from(COMPRESSIONS),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 10**6),
    st.sampled_from([2, 4]),
)
def test_a_transfer_has_the_bytes_of_its_samples(
    compression: str, samples: int, others: int, sample_bytes: int, number_bytes: int
) -> None:
    def sent(count: int) -> int:
        return wire_bytes(compression, count, sample_bytes, number_bytes)

    assert sent(samples + others) == sent(samples) + sent(others)


def sends(scenario: Scenario, plan: Plan) -> list[Event]:
    record = Simulator().run(scenario, plan, None, 2)
    return [event for event in record.events if event.kind is EventKind.SEND]


def place(event: Event) -> tuple[object, ...]:
    return event.device, event.peer, event.action, event.pipeline, event.stage, event.microbatch, event.step


@settings(max_examples=60)
@given(without_waiting(st.one_of(replicated(), on_shared_links(replicated()))), st.sampled_from(COMPRESSIONS))
def test_only_transfers_between_regions_shrink_and_by_the_rule(case: tuple[Scenario, Plan], compression: str) -> None:
    scenario, plan = case
    plain = Counter({place(each): each.size_bytes for each in sends(scenario, replace(plan, compression="none"))})
    compressed = Counter(
        {place(each): each.size_bytes for each in sends(scenario, replace(plan, compression=compression))}
    )
    assert plain.keys() == compressed.keys()
    for key, size_bytes in plain.items():
        device, peer, action, pipeline, stage = key[:5]
        expected = size_bytes
        summed = action in (SYNC_ACTION, UPDATE_ACTION)
        if not summed and size_bytes and scenario.cluster.crosses_regions(str(device), str(peer)):
            assert isinstance(pipeline, int)
            assert isinstance(stage, int)
            boundary = plan.pipelines[pipeline].stages[stage - (action != "F")].end_layer - 1
            sample_bytes = scenario.model.layers[boundary].output_bytes
            samples, numbers = size_bytes // sample_bytes, -(-sample_bytes // 4)
            expected = {"none": size_bytes, "bf16": 2 * numbers * samples, "int8": (numbers + 4) * samples}[compression]
        assert compressed[key] == expected


@pytest.mark.parametrize(("compression", "sample_bytes"), [("none", 4000), ("bf16", 2000), ("int8", 1004)])
def test_schedules_and_steps_know_the_smaller_transfers(compression: str, sample_bytes: int) -> None:
    # 8 kbit/s between the regions of two devices: a second for a thousand bytes.
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], output_bytes=[4000, 0], bandwidth_bps=8e3, global_batch=2)
    plan = replace(chain_plan(scenario, microbatches=[2]), compression=compression)
    problem = scheduling_problem(plan.pipelines[0], scenario, compression)
    seconds = 2 * sample_bytes / 1000
    assert problem.forward_transmission_s.tolist() == problem.backward_transmission_s.tolist() == [[seconds]]
    assert step_time_s(plan, scenario) == pytest.approx(8 + 2 * seconds)


def test_less_to_carry_needs_less_depth() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], output_bytes=[4000, 0], bandwidth_bps=16e3, global_batch=16)
    plan = chain_plan(scenario)
    depths = {}
    for compression in COMPRESSIONS:
        made = with_schedule(replace(plan, compression=compression), scenario, "compact-zb")
        assert made.compression == compression
        depths[compression] = made.pipelines[0].stages[0].in_flight
    # Round trips of 8, 6 and about 5 s, against the slowest of stages and links: 2 s.
    assert depths == {"none": 4, "bf16": 3, "int8": 3}
