"""Launch overhead, stragglers, slow-downs and jitter of compute against closed forms."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.events.event import EventKind
from planner.plan.plan import Plan
from planner.runs.record import RunRecord
from planner.scenario.effects import ComputeEffects, Slowdown, Straggler
from planner.scenario.faults import Absence
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario
from tests.helpers.scenarios.effect_runs import BY_EVENTS, computed, run, with_compute, with_network
from tests.helpers.strategies.run_strategies import chains, replicated, with_links


def durations_s(record: RunRecord) -> dict[tuple[str, str, int, int, int], float]:
    """Seconds of each action, by device, kind, stage, microbatch and step."""
    return {
        (e.device, e.action, e.stage, e.microbatch, e.step): e.end_s - e.start_s
        for e in record.events
        if e.kind is EventKind.COMPUTE
    }


@settings(max_examples=60)
@given(replicated(), st.floats(0, 1), st.lists(st.floats(0.2, 5), min_size=18, max_size=18))
def test_every_action_has_its_overhead_and_a_stragglers_takes_longer(
    case: tuple[Scenario, Plan], overhead_s: float, factors: list[float]
) -> None:
    scenario, plan = case
    factor = dict(zip(sorted(plan.devices)[::2], factors, strict=False))
    stragglers = tuple(Straggler(device, each) for device, each in factor.items())
    plain = durations_s(run(scenario, plan))
    slowed = durations_s(
        run(with_compute(scenario, ComputeEffects(launch_overhead_s=overhead_s, stragglers=stragglers)), plan)
    )
    expected = {key: (profiled_s + overhead_s) * factor.get(key[0], 1.0) for key, profiled_s in plain.items()}
    assert slowed == pytest.approx(expected, rel=1e-7, abs=1e-9)


def progress(times_s: Sequence[float], speeds: Sequence[float], start_s: float, end_s: float) -> float:
    """Integral of a speed over time; the last one holds for ever."""
    total = 0.0
    for (from_s, speed), (until_s, _) in pairwise([*zip(times_s, speeds, strict=True), (math.inf, 0.0)]):
        total += speed * max(0.0, min(until_s, end_s) - max(from_s, start_s))
    return total


SPEEDS = st.one_of(st.just(0.0), st.floats(0.1, 4))


@settings(max_examples=100)
@given(chains(), st.lists(st.tuples(st.floats(0.1, 20), SPEEDS), max_size=8), st.floats(0.1, 4), st.floats(0.3, 3))
def test_a_slowed_device_moves_on_as_its_speed_says(
    case: tuple[Scenario, Plan], pieces: list[tuple[float, float]], last: float, factor: float
) -> None:
    scenario, plan = case
    times_s = [0.0, *np.cumsum([length_s for length_s, _ in pieces]).tolist()]
    speeds = [*(speed for _, speed in pieces), last]
    slowdown = Slowdown("device-0", tuple(times_s), tuple(speeds))
    effects = ComputeEffects(slowdowns=(slowdown,), stragglers=(Straggler("device-0", factor),))
    plain, record = durations_s(run(scenario, plan)), run(with_compute(scenario, effects), plan)
    for event in record.events:
        if event.kind is EventKind.COMPUTE:
            key = (event.device, event.action, event.stage, event.microbatch, event.step)
            if event.device == "device-0":
                done_s = progress(times_s, speeds, event.start_s, event.end_s) / factor
            else:
                done_s = event.end_s - event.start_s
            assert done_s == pytest.approx(plain[key], rel=1e-7, abs=1e-9)


def test_a_slowed_device_by_hand() -> None:
    # Speed 1 until 1 s, 0 until 5 s, 0.5 until 7 s, then 2: 2 s of forward last from 0 to 7 s, 4 s of backward 2 s.
    scenario = chain_scenario([2.0], [4.0], global_batch=1)
    slowdown = Slowdown("device-0", (0.0, 1.0, 5.0, 7.0), (1.0, 0.0, 0.5, 2.0))
    record = run(with_compute(scenario, ComputeEffects(slowdowns=(slowdown,))), chain_plan(scenario))
    assert computed(record, "F", "device-0") == [(0.0, 7.0)]
    assert computed(record, "B", "device-0") == [(7.0, 9.0)]


DEVIATION, STEPS = 0.4, 200


def jittered(seed: int, scenario: Scenario, plan: Plan) -> dict[tuple[str, str, int, int, int], float]:
    return durations_s(run(with_compute(scenario, ComputeEffects(jitter=DEVIATION, seed=seed)), plan, STEPS))


def test_jitter_is_log_normal_of_mean_one() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], output_bytes=[0, 0])
    factors = np.array(list(jittered(7, scenario, chain_plan(scenario)).values()))
    count = STEPS * 2 * 2 * 8
    assert len(factors) == count
    # Five standard errors.
    assert abs(factors.mean() - 1) < 5 * DEVIATION / math.sqrt(count)
    spread = math.sqrt(math.log1p(DEVIATION**2))
    assert abs(np.log(factors).mean() + spread**2 / 2) < 5 * spread / math.sqrt(count)
    assert abs(np.log(factors).std() - spread) < 5 * spread / math.sqrt(2 * count)


def test_jitter_follows_its_seed_alone() -> None:
    scenario = chain_scenario([1.0, 2.0], [3.0, 1.0], output_bytes=[0, 0], global_batch=4)
    plan = chain_plan(scenario)
    once = jittered(7, scenario, plan)
    assert jittered(7, scenario, plan) == once
    other = jittered(8, scenario, plan)
    assert not any(once[key] == pytest.approx(other[key], rel=1e-6) for key in once)
    by_step: defaultdict[tuple[str, str, int, int], set[float]] = defaultdict(set)
    for (*place, _), seconds in once.items():
        by_step[tuple(place)].add(seconds)
    assert all(len(seconds) == STEPS for seconds in by_step.values())
    # Slow links and the kernel's events change when things happen, not how long they take.
    slow = with_links(scenario, [replace(link, latency_s=3.7) for link in scenario.cluster.links])
    slow = with_network(slow, BY_EVENTS)
    later = jittered(7, slow, plan)
    assert later == pytest.approx(once, rel=1e-6)


def test_jitter_is_an_action_s_in_however_many_pieces_it_is() -> None:
    """Sums that overlap cut the last backwards, but not those of a device that leaves some time."""
    scenario = mesh_scenario(2, [1.0, 2.0], [1.0, 2.0])
    plan = layered_plan(scenario, [([(2, 2, 1)], [4, 4])])
    plan = replace(plan, synchronisation=replace(plan.synchronisation, bucket_bytes=1))
    leaving = replace(scenario, faults=(Absence("device-0", 1e9),))
    assert jittered(7, leaving, plan) == pytest.approx(jittered(7, scenario, plan), rel=1e-9)
