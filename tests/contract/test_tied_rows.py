"""Layers that share parameters: both backends exchange their gradients, and write the same rows."""

from dataclasses import replace

import pytest

from executor.backend import TorchBackend
from planner.plan.plan import Synchronisation
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from tests.helpers.strategies.timeless_rows import rows

TABLE_BYTES = 40_000


@pytest.mark.parametrize("bucket_bytes", [0, 10_000])
def test_both_write_the_same_rows(bucket_bytes: int) -> None:
    scenario = mesh_scenario(
        3, [0.004] * 3, [0.008] * 3, link=lambda a, b: (200e6, 0.002), parameter_bytes=[50_000, 20_000, 60_000]
    )
    first, inner, last = scenario.model.layers
    tied = (replace(first, tied_bytes=TABLE_BYTES), inner, replace(last, tied_bytes=TABLE_BYTES))
    scenario = replace(scenario, model=replace(scenario.model, layers=tied))
    plan = layered_plan(scenario, [([(1, 2, 2), (3, 1, 1)], [4, 4])])
    plan = replace(plan, synchronisation=Synchronisation(bucket_bytes=bucket_bytes))
    simulated = Simulator().run(scenario, plan, None, 3)
    paced = TorchBackend("paced", emulator="shaper").run(scenario, plan, None, 3)
    assert rows(simulated) == rows(paced)
