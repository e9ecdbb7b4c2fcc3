"""Writes the events of runs in which everything is unsteady; a test starts it in processes of its own."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.events.event import write_events
from planner.plan.plan import Plan, Synchronisation
from planner.runs.event_totals import step_ends_s
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Link
from planner.scenario.effects import TCP, ComputeEffects, Effects, Slowdown, Straggler
from planner.scenario.faults import Absence, Hang, LinkOutage
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from tests.helpers.strategies.scripted_policy import Scripted
from traces.trace import LinkTrace

STEPS = 12
TRACE = LinkTrace(np.array([0.0, 10.0, 40.0]), np.array([1e6, 2e4, 5e5]), 60.0, np.array([0.02, 0.5, 0.1]))


def swaying() -> tuple[Scenario, Plan]:
    """Two pipelines of two stages, one of them replicated, over links that slow down and recover."""
    scenario = mesh_scenario(
        5,
        [0.1, 0.05, 0.15],
        [0.2, 0.1, 0.3],
        output_bytes=[5000, 4000, 0],
        parameter_bytes=[4000, 8000, 4000],
        link=lambda a, b: (TRACE.mean_bps, 0.02 * (a + 1)),
        trace=replace(TRACE, latency_s=None),
        global_batch=20,
    )
    return scenario, layered_plan(scenario, [([(1, 2, 2), (3, 1, 1)], [3] * 4), ([(2, 1, 2), (3, 1, 1)], [2] * 4)])


def hampered() -> tuple[Scenario, Plan]:
    """The same over links that regions share, with every effect and faults of all kinds."""
    scenario, plan = swaying()
    devices = tuple(
        replace(device, region="west" if index < 3 else "east") for index, device in enumerate(scenario.cluster.devices)
    )
    links = [
        Link(source, target, TRACE.mean_bps, 0.1, TRACE if source != target else None)
        for source in ("west", "east")
        for target in ("west", "east")
    ]
    compute = ComputeEffects(
        0.01, 0.4, 7, (Straggler("device-1", 1.5),), (Slowdown("device-3", (0.0, 4.0, 9.0), (1.0, 0.5, 0.8)),)
    )
    faults = (Absence("device-4", 3.0, 5.0), Hang("device-0", 8.0, 9.0), LinkOutage("west->east", 12.0, 15.0))
    cluster = Cluster(devices, tuple(links))
    return replace(scenario, cluster=cluster, effects=Effects(TCP, compute), faults=faults), plan


def adapting() -> RunRecord:
    scenario, plan = swaying()
    return Simulator().run(scenario, plan, make_policy("depth", scenario), STEPS)


def fixed() -> RunRecord:
    return Simulator().run(*hampered(), None, STEPS)


def choosing() -> RunRecord:
    scenario, plan = hampered()
    return Simulator().run(scenario, replace(plan, order="dynamic", schedule="zb-h1"), None, STEPS)


def updating() -> RunRecord:
    scenario, plan = hampered()
    synchronisation = Synchronisation("asgd-ga", interval_steps=2, staleness_bound=3)
    return Simulator().run(scenario, replace(plan, synchronisation=synchronisation), None, STEPS)


def moving() -> RunRecord:
    """Layers go to other devices and back, and one leaves for good."""
    scenario, plan = swaying()
    others = [([(1, 2, 2), (3, 1, 1)], [3] * 4), ([(1, 1, 2), (3, 1, 1)], [2] * 4)]
    rest = layered_plan(scenario, [([(1, 2, 2), (3, 2, 1)], [5] * 4)])
    policy = Scripted({1: layered_plan(scenario, others), 4: plan}, {("device-4",): rest})
    ends_s = step_ends_s(Simulator().run(scenario, plan, None, STEPS).events)
    return Simulator().run(replace(scenario, faults=(Absence("device-4", ends_s[-3]),)), plan, policy, STEPS)


def copying() -> RunRecord:
    """The layers of the last stage, which only one device trains, are copied to the first one."""
    scenario, _ = swaying()
    plan = layered_plan(scenario, [([(1, 2, 2), (3, 1, 1)], [5] * 4)])
    return Simulator(backup_every=2).run(scenario, plan, None, STEPS)


RUNS: Mapping[str, Callable[[], RunRecord]] = {
    "adapting": adapting,
    "fixed": fixed,
    "choosing": choosing,
    "updating": updating,
    "moving": moving,
    "copying": copying,
}


if __name__ == "__main__":
    for name, run in RUNS.items():
        record = run()
        write_events(record.events, Path(sys.argv[1]) / f"{name}.parquet")
        print(name, len(record.decisions))
