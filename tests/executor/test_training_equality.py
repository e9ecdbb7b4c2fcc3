"""Training through a plan equals training in one process: the executor's main promise."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training import CONVOLUTIONAL, GPT, Trained, hybrid_plan, train_in_one_process, training_scenario

from executor.backend import TorchBackend
from planner.observation import Observation
from planner.plan import Plan, Synchronisation
from planner.policy import Policy
from planner.scenario import ModelCode, Optimizer, Scenario

STEPS = 5
TOLERANCE = 1e-6

CODES = {"gpt": GPT, "convolutional": CONVOLUTIONAL}
LAYERS = {"gpt": 6, "convolutional": 6}


def train(scenario: Scenario, plan: Plan, folder: Path, policy: Policy | None = None) -> Trained:
    target = folder / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, policy, STEPS)
    return Trained(list(record.losses), load_file(target))


def assert_equal(trained: Trained, expected: Trained) -> None:
    assert trained.parameters.keys() == expected.parameters.keys()
    torch.testing.assert_close(
        torch.tensor(trained.losses), torch.tensor(expected.losses), rtol=TOLERANCE, atol=TOLERANCE
    )
    for name, value in expected.parameters.items():
        torch.testing.assert_close(trained.parameters[name], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("model", ["gpt", "convolutional"])
def test_unequal_stages_and_uneven_microbatches(model: str, schedule: str, ranks: int, tmp_path: Path) -> None:
    scenario = training_scenario(CODES[model], ranks)
    layers = [1, LAYERS[model] - 1] if ranks == 2 else [2, 1, LAYERS[model] - 3]
    plan = hybrid_plan(scenario, schedule, [([(count, [1.0]) for count in layers], [5, 4, 3])])
    assert_equal(train(scenario, plan, tmp_path), train_in_one_process(scenario, STEPS))


@pytest.mark.parametrize(
    "pipelines",
    [
        pytest.param([([(2, [1.0, 2.0]), (4, [1.0])], [5, 4, 3])], id="a-replicated-stage-with-unequal-shares"),
        pytest.param([([(6, [1.0, 3.0, 2.0])], [12])], id="data-parallel"),
        pytest.param([([(2, [1.0]), (4, [1.0])], [3, 4]), ([(6, [1.0])], [5])], id="two-unlike-pipelines"),
    ],
)
def test_replicas_and_pipelines(pipelines: list, tmp_path: Path) -> None:
    scenario = training_scenario(GPT, 3)
    plan = hybrid_plan(scenario, "1f1b", pipelines)
    assert_equal(train(scenario, plan, tmp_path), train_in_one_process(scenario, STEPS))


@pytest.mark.parametrize(
    ("algorithm", "regions", "pipelines"),
    [
        pytest.param("tree", "aaa", [([(6, [1.0, 3.0, 2.0])], [12])], id="tree-over-three"),
        pytest.param("hierarchical", "abab", [([(6, [1.0, 3.0, 2.0, 2.0])], [12])], id="two-regions-of-two"),
        pytest.param(
            "hierarchical", "aab", [([(6, [1.0, 2.0])], [4, 3]), ([(6, [1.0])], [5])], id="a-region-of-two-and-one"
        ),
    ],
)
def test_the_other_ways_to_sum_gradients(algorithm: str, regions: str, pipelines: list, tmp_path: Path) -> None:
    scenario = training_scenario(GPT, len(regions), regions=regions)
    plan = replace(hybrid_plan(scenario, "1f1b", pipelines), synchronisation=Synchronisation(algorithm=algorithm))
    assert_equal(train(scenario, plan, tmp_path), train_in_one_process(scenario, STEPS))


class AlternatingMicrobatches:
    """Changes the number of microbatches and the depth after every step."""

    def decide(self, observation: Observation, plan: Plan) -> Plan:
        count = 2 if observation.step % 2 else 6
        return plan.with_microbatches(0, (12 // count,) * count, (min(count, 4), 1))


def test_a_plan_that_changes_while_it_runs(tmp_path: Path) -> None:
    scenario = training_scenario(GPT, 2)
    plan = hybrid_plan(scenario, "1f1b", [([(3, [1.0]), (3, [1.0])], [4, 4, 4])])
    assert_equal(train(scenario, plan, tmp_path, AlternatingMicrobatches()), train_in_one_process(scenario, STEPS))


# AdamW divides by the gradient's own size: rounding in a gradient near zero moves a parameter by a share of the
# learning rate, so its difference is about the learning rate times 1e-4, whatever the gradient.
@pytest.mark.parametrize("rule", [Optimizer("sgd", 0.05), Optimizer("adamw", 0.001, weight_decay=0.01)])
def test_the_other_update_rules(rule: Optimizer, tmp_path: Path) -> None:
    scenario = training_scenario(CONVOLUTIONAL, 2, optimizer=rule)
    plan = hybrid_plan(scenario, "1f1b", [([(2, [1.0]), (4, [1.0])], [5, 4, 3])])
    assert_equal(train(scenario, plan, tmp_path), train_in_one_process(scenario, STEPS))


def test_a_model_of_the_users_own_whose_first_stage_has_no_parameters(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n"
        "class Model:\n"
        "    def __init__(self, width):\n"
        "        self.layers = [torch.nn.Tanh(), torch.nn.Linear(3, width), torch.nn.Linear(width, 1)]\n"
        "    def loss(self, outputs, targets):\n"
        "        return torch.nn.functional.mse_loss(outputs, targets)\n"
        "    def samples(self, first, count):\n"
        "        x = torch.arange(first, first + count).unsqueeze(1) * torch.tensor([0.1, 0.2, 0.3])\n"
        "        return torch.sin(x), torch.cos(x).mean(1, keepdim=True)\n"
        "def build(width=4):\n"
        "    return Model(width)\n"
    )
    scenario = training_scenario(ModelCode(path, {"width": 5}), 3)
    plan = hybrid_plan(scenario, "1f1b", [([(1, [1.0]), (1, [1.0]), (1, [1.0])], [6, 6])])
    assert_equal(train(scenario, plan, tmp_path), train_in_one_process(scenario, STEPS))
