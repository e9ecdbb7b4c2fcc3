"""Regions that are cut off from each other for ten seconds: the training goes on afterwards, and nothing is lost."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from executor.backend import TorchBackend
from executor.wan.testbed import missing
from planner.events.event import EventKind
from planner.runs.event_totals import step_ends_s
from planner.scenario.faults import LinkOutage
from planner.systems.deepcee.policy import DepthPolicy
from tests.helpers.processes.training import GPT, assert_trained, hybrid_plan, train_in_one_process, training_scenario

STEPS = 40
CUT_S = 10.0
BEGINS_S = 1.0
# A sender tries again ever more rarely: after ten seconds it may take as long until it does so again.
MOST_S = 2 * CUT_S + 2


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize("adapts", [False, True])
def test_a_cut_of_ten_seconds(adapts: bool, tmp_path: Path) -> None:
    lack = missing()
    if lack is not None:
        pytest.skip(lack)
    scenario = training_scenario(GPT, 3, regions=["north", "north", "south"])
    links = tuple(
        replace(link, latency_s=0.01, bandwidth_bps=200e6) if link.source != link.target else link
        for link in scenario.cluster.links
    )
    names = ("north->south", "south->north")
    scenario = replace(
        scenario,
        cluster=replace(scenario.cluster, links=links),
        faults=tuple(LinkOutage(name, BEGINS_S, BEGINS_S + CUT_S) for name in names),
    )
    plan = hybrid_plan(scenario, "1f1b", [([(2, [1.0]), (2, [1.0]), (2, [1.0])], [2] * 6)])
    target = tmp_path / "parameters.safetensors"
    backend = TorchBackend("real", emulator="relay", parameters=target, backup_every=1)
    policy = DepthPolicy(scenario) if adapts else None
    record = backend.run(scenario, plan, policy, STEPS)
    ends_s = step_ends_s(record.events)
    assert len(ends_s) == STEPS
    longest_s = max(later - earlier for earlier, later in pairwise([0.0, *ends_s]))
    print(f"MEASURED a cut of {CUT_S:.0f} s made a step of {longest_s:.1f} s")
    assert CUT_S - 1 < longest_s < MOST_S
    crossed = [e for e in record.events if e.kind is EventKind.SEND and {e.device, e.peer} == {"device-1", "device-2"}]
    # Each once: nobody was taken for lost, and no step was done again.
    assert len({(e.device, e.action, e.step, e.microbatch) for e in crossed}) == len(crossed)
    assert_trained(record, target, train_in_one_process(scenario, STEPS))
