"""A stage whose layers pass on what they get, or a view of it, to one that computes in place trains as one process."""

from pathlib import Path

import torch

from planner.scenario.scenario import ModelCode
from tests.helpers.processes.many_jobs import train_one_by_one
from tests.helpers.processes.training import Trained, placed_plan, train_in_one_process, training_scenario

STEPS = 3

MODEL = """
import torch
from torch import nn

class Model:
    def __init__(self):
        self.layers = [nn.Linear(3, 6), {passes_on}, nn.Identity(), nn.ReLU(inplace=True), nn.Linear(6, 1)]
        self.inputs = torch.randn(7, 3, generator=torch.Generator().manual_seed(3))
        self.size = 7
    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)
    def select(self, indices):
        return self.inputs[indices], self.inputs[indices].sum(1, keepdim=True)

def build():
    return Model()
"""


PASSING_ON = {"flatten": "nn.Flatten()", "identity": "nn.Identity()", "views": "nn.Unflatten(1, (2, 3)), nn.Flatten()"}


def test_in_place_behind_layers_that_compute_nothing(tmp_path: Path) -> None:
    runs = {}
    for name, passes_on in PASSING_ON.items():
        path = tmp_path / f"{name}.py"
        path.write_text(MODEL.format(passes_on=passes_on))
        scenario = training_scenario(ModelCode(path, {}), 2)
        stages = [(1, 0), (len(scenario.model.layers) - 1, 1)]
        for recompute in ((), (0, 1)):
            plan = placed_plan(scenario, "zb-h1", stages, [[1.0], [1.0]], (5, 4, 3), recompute=recompute)
            runs[f"{name} {recompute}"] = scenario, plan
    for name, trained in train_one_by_one(runs, STEPS).items():
        assert isinstance(trained, Trained), (name, trained)
        expected = train_in_one_process(runs[name][0], STEPS)
        near = {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(torch.tensor(trained.losses), torch.tensor(expected.losses), **near)
        torch.testing.assert_close(dict(trained.parameters), dict(expected.parameters), **near)
