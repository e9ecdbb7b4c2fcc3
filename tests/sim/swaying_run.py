"""Writes the events of one run of everything that could be unsteady; a test starts it in processes of its own."""

import sys
from pathlib import Path

import numpy as np
from builders import layered_plan, mesh_scenario

from planner.events import write_events
from planner.plan import Plan
from planner.policies import make_policy
from planner.scenario import Scenario
from sim.simulator import Simulator
from traces.trace import LinkTrace

STEPS = 12


def swaying() -> tuple[Scenario, Plan]:
    """Two pipelines of two stages, one of them replicated, over links that slow down and recover."""
    trace = LinkTrace(np.array([0.0, 10.0, 40.0]), np.array([1e6, 2e4, 5e5]), 60.0)
    scenario = mesh_scenario(
        5,
        [0.1, 0.05, 0.15],
        [0.2, 0.1, 0.3],
        output_bytes=[5000, 4000, 0],
        parameter_bytes=[4000, 8000, 4000],
        link=lambda a, b: (trace.mean_bps, 0.02 * (a + 1)),
        trace=trace,
        global_batch=20,
    )
    return scenario, layered_plan(scenario, [([(1, 2, 2), (3, 1, 1)], [3] * 4), ([(2, 1, 2), (3, 1, 1)], [2] * 4)])


if __name__ == "__main__":
    scenario, plan = swaying()
    record = Simulator().run(scenario, plan, make_policy("depth", scenario), STEPS)
    write_events(record.events, Path(sys.argv[1]))
    print(len(record.decisions))
