from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.round_latency import RoundStep, round_latency_s, transfer_step
from planner.systems.asteroid.stage_costs import StageCosts
from planner.systems.asteroid.strategy import HybridRules, asteroid_depth, counted_split, plain_depth
from tests.helpers.scenarios.hybrid_scenarios import unlike_scenarios


def every_round(
    scenario: Scenario, devices: tuple[Device, ...], samples: int, microbatches: int, rules: HybridRules
) -> Iterator[float]:
    """The latency of every split into groups of neighbours that fits, by the definition."""
    costs, layers = StageCosts(scenario, samples), len(scenario.model.layers)
    for count in range(1, min(layers, len(devices)) + 1):
        for cuts in combinations(range(1, layers), count - 1):
            for borders in combinations(range(1, len(devices)), count - 1):
                stages = []
                for index, ((first, end), (start, stop)) in enumerate(
                    zip(pairwise((0, *cuts, layers)), pairwise((0, *borders, len(devices))), strict=True)
                ):
                    depth = min(rules.depth(count - index), microbatches)
                    too_wide = rules.widest is not None and stop - start > rules.widest
                    stages.append(None if too_wide else costs.choose(first, end, devices[start:stop], depth))
                chosen = [stage for stage in stages if stage is not None]
                if len(chosen) < count:
                    continue
                steps: list[RoundStep] = [chosen[0].step]
                for left, right in pairwise(chosen):
                    names = [tuple(device for device, _ in each.samples) for each in (left, right)]
                    steps += [transfer_step(scenario, left.end_layer, samples, *names), right.step]
                yield round_latency_s(steps, microbatches, rules.duplex)


RULES = st.builds(
    HybridRules, st.sampled_from([asteroid_depth, plain_depth]), st.booleans(), st.sampled_from([None, 1, 2])
)


@settings(max_examples=150)
@given(unlike_scenarios(), st.integers(1, 4), st.integers(1, 8), RULES)
def test_no_split_is_better(scenario: Scenario, samples: int, microbatches: int, rules: HybridRules) -> None:
    devices = scenario.cluster.devices
    split, _ = counted_split(scenario, devices, samples, microbatches, rules)
    least_s = min(every_round(scenario, devices, samples, microbatches, rules), default=None)
    if least_s is None:
        assert split is None
        return
    assert split is not None
    assert split.tail.latency_s == pytest.approx(least_s)


def test_depths_count_communication_as_a_step() -> None:
    assert [asteroid_depth(stages) for stages in (3, 2, 1)] == [5, 3, 1]
    assert [plain_depth(stages) for stages in (3, 2, 1)] == [3, 2, 1]
