"""Layers cut over the devices of a host train as one process does, through real processes; what cannot be is refused.

A cut adds the parts of a sum in another order than one process. Measured over these cases on float32: parameters differ
by 1.2e-7 at most, losses (which begin near 4) by 6e-7.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from executor.backend import TorchBackend
from executor.training.models.loading import check_model, load_model, load_with_sizes
from executor.training.parallel_layout import _check_names, check_layouts
from executor.training.split_backward import splittable
from executor.training.tensor_parallel import ShardedModule, parameter_parts, shard_layer
from executor.validate import check_supported
from planner.adapt.observation import Observation
from planner.files.plan import write_plan
from planner.files.resolved_scenario import write_resolved_scenario
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario.cluster import Cluster
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.training import CONVOLUTIONAL, GPT, Trained, train_in_one_process, training_scenario
from traces.common.errors import InputError

STEPS = 4
TOLERANCE = 1e-6


def gpt_shard_bytes(scenario: Scenario, degree: int) -> list[int]:
    """By arithmetic: a block's four weights and the biases behind columns are cut, the rest is not."""
    assert scenario.code is not None
    width = scenario.code.arguments["width"]
    cut = 3 * width * width + 3 * width + width * width + 4 * width * width + 4 * width + 4 * width * width
    whole = 4 * width + 2 * width
    block = 4 * (cut // degree + whole)
    return [
        layer.parameter_bytes if index in (0, len(scenario.model.layers) - 1) else block
        for index, layer in enumerate(scenario.model.layers)
    ]


def on_one_host(code: ModelCode, devices: int, degrees: Collection[int] = (2,)) -> Scenario:
    scenario = training_scenario(code, devices)
    cluster = scenario.cluster
    placed = tuple(replace(device, host="host") for device in cluster.devices)

    def shard(degree: int) -> ModelProfile:
        sizes = gpt_shard_bytes(scenario, degree) if code.path == GPT.path else [0] * len(scenario.model.layers)
        layers = zip(scenario.model.layers, sizes, strict=True)
        return ModelProfile("shard", tuple(replace(layer, parameter_bytes=size) for layer, size in layers))

    model = replace(scenario.model, sharded={degree: shard(degree) for degree in degrees})
    return replace(scenario, cluster=Cluster(placed, cluster.links), model=model)


def grouped_plan(
    scenario: Scenario,
    stages: Sequence[tuple[int, Sequence[tuple[int, float]]]],
    microbatches: Sequence[int],
    *,
    schedule: str = "1f1b",
    recompute: Collection[int] = (),
) -> Plan:
    """One pipeline of (layers, (degree, share) of each replica) per stage; devices in order."""
    names = iter(device.name for device in scenario.cluster.devices)
    first, built = 0, []
    for index, (layers, replicas) in enumerate(stages):
        groups = [([next(names) for _ in range(degree)], share) for degree, share in replicas]
        made = tuple(Replica(group[0], share, tuple(group[1:])) for group, share in groups)
        built.append(Stage(first, first + layers, made, len(stages) - index, index in recompute))
        first += layers
    pipeline = Pipeline(tuple(built), tuple(microbatches))
    return Plan(scenario.name, scenario.model.name, "hand", schedule, (pipeline,))


def train(scenario: Scenario, plan: Plan, folder: Path) -> Trained:
    target = folder / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, None, STEPS)
    return Trained(list(record.losses), load_file(target))


def assert_equal(trained: Trained, expected: Trained) -> None:
    assert trained.parameters.keys() == expected.parameters.keys()
    near = {"rtol": TOLERANCE, "atol": TOLERANCE}
    torch.testing.assert_close(torch.tensor(trained.losses), torch.tensor(expected.losses), **near)
    torch.testing.assert_close(dict(trained.parameters), dict(expected.parameters), **near)


PAIR = [(2, 1.0)]


@pytest.mark.parametrize(
    ("stages", "schedule", "recompute"),
    [
        pytest.param([(6, PAIR)], "1f1b", (0,), id="one-stage-recomputing", marks=pytest.mark.slow),
        pytest.param([(2, [(1, 1.0)]), (4, PAIR)], "zb-h1", (), id="a-single-device-before-a-pair"),
        pytest.param([(6, [(2, 1.0), (2, 2.0)])], "gpipe", (), id="two-replicas", marks=pytest.mark.slow),
    ],
)
def test_groups_train_as_one_process(
    stages: Sequence[tuple[int, Sequence[tuple[int, float]]]], schedule: str, recompute: Sequence[int], tmp_path: Path
) -> None:
    scenario = on_one_host(GPT, sum(degree for _, replicas in stages for degree, _ in replicas))
    plan = grouped_plan(scenario, stages, (5, 4, 3), schedule=schedule, recompute=recompute)
    assert_equal(train(scenario, plan, tmp_path), train_in_one_process(scenario, STEPS))


def test_two_stages_clipped_by_every_shard_in_an_order_found_as_it_goes(tmp_path: Path) -> None:
    scenario = on_one_host(GPT, 4)
    scenario = replace(scenario, training=replace(scenario.training, clip_norm=0.05))
    plan = grouped_plan(scenario, [(3, PAIR), (3, PAIR)], (3, 3, 3, 3), schedule="zb-h1", recompute=(0,))
    trained = train(scenario, replace(plan, order="dynamic"), tmp_path)
    assert_equal(trained, train_in_one_process(scenario, STEPS))


class FinerAfterTheFirstStep:
    """Changes the plan once, whatever it sees."""

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        return plan.with_microbatches(0, (4, 4, 4), (1,)) if observation.step == 0 else None


MODEL = """
import torch
from torch import nn

class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Linear(6, width, bias=False), nn.LayerNorm(6), nn.Linear(width, 6)
        self.wide.weight.requires_grad_(width != 10)
    def forward(self, hidden):
        return self.norm(hidden + self.narrow(torch.tanh(self.wide(hidden))))

class Model:
    def __init__(self, width, layout):
        self.layers = [nn.Linear(3, 6), Pair(width), Pair(10), nn.Linear(6, 1)]
        self.layout = layout
    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)
    def samples(self, first, count):
        inputs = torch.arange(first, first + count)[:, None] * torch.tensor([[0.3, 0.7, 1.1]])
        return inputs.sin(), inputs.cos().sum(1, keepdim=True)
    def parallel_layout(self, index):
        return self.layout if index in (1, 2) else {}

def build(width=8, **layout):
    return Model(width, layout or {"wide": "column", "narrow": "row"})
"""


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> ModelCode:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(MODEL)
    return ModelCode(path, {})


def own_scenario(code: ModelCode, devices: int = 2, *, shard_bytes: Mapping[int, int] | None = None) -> Scenario:
    """Two pairs, the second with a frozen weight; the sizes of shards by hand, in numbers of four bytes."""
    numbers = {0: 24, 1: 8 * 6 // 2 + 8 * 6 // 2 + 6 + 12, 2: 10 * 6 // 2 + 10 * 6 // 2 + 6 + 12, 3: 7}
    scenario = on_one_host(code, devices)
    sizes = {index: 4 * number for index, number in numbers.items()} | dict(shard_bytes or {})
    layers = tuple(replace(layer, parameter_bytes=sizes[index]) for index, layer in enumerate(scenario.model.layers))
    return replace(scenario, model=replace(scenario.model, sharded={2: ModelProfile("shard", layers)}))


def test_groups_that_sum_their_gradients_follow_a_policy(own_model: ModelCode, tmp_path: Path) -> None:
    """Sends of partners have no rows, and none of their steps waits for one before the policy sees it."""
    scenario = own_scenario(own_model, 4)
    plan = grouped_plan(scenario, [(4, [(2, 1.0), (2, 1.0)])], (6, 6))
    target = tmp_path / "parameters.safetensors"
    backend = TorchBackend("real", parameters=target)
    record = backend.run(scenario, plan, FinerAfterTheFirstStep(), STEPS)
    assert [decision.first_step for decision in record.decisions] == [2]
    assert_equal(Trained(list(record.losses), load_file(target)), train_in_one_process(scenario, STEPS))


def test_adamw_on_the_shards_of_a_model_of_the_users_own(own_model: ModelCode, tmp_path: Path) -> None:
    scenario = own_scenario(own_model)
    training = replace(scenario.training, optimizer=Optimizer("adamw", 0.001, weight_decay=0.01), clip_norm=0.5)
    scenario = replace(scenario, training=training)
    plan = grouped_plan(scenario, [(4, PAIR)], (6, 6))
    assert_equal(train(scenario, plan, tmp_path), train_in_one_process(scenario, STEPS))


@pytest.mark.parametrize(
    ("arguments", "shard_bytes", "where", "problem", "valid"),
    [
        ({"wide": "column"}, {}, "", "cannot be computed in 2 parts by its parallel layout", "correct the model"),
        ({"wide": "row", "narrow": "column"}, {}, "", "cannot be computed in 2 parts", "correct the model"),
        ({"wide": "columns"}, {}, "parallel_layout(1)", "'wide' has the value 'columns'", "'column', 'row', 'voc"),
        ({"wider": "column"}, {}, "parallel_layout(1)", "no submodule 'wider'", "wide, narrow"),
        ({"norm": "column"}, {}, "parallel_layout(1)", "'norm' is a LayerNorm", "only torch.nn.Linear"),
        (
            {"width": 7},
            {},
            "parallel_layout(1)",
            "'wide' cannot be sharded by column into 2",
            "7, must be a multiple of 2",
        ),
        ({}, {2: 4}, "parallel_layout(2)", "each of 2 devices holds 312 bytes", "of a shard has 4"),
    ],
)
def test_a_layout_that_cannot_be(
    arguments: Mapping[str, object],
    shard_bytes: Mapping[int, int],
    where: str,
    problem: str,
    valid: str,
    own_model: ModelCode,
) -> None:
    scenario = own_scenario(replace(own_model, arguments=arguments), shard_bytes=shard_bytes)
    with pytest.raises(InputError) as refused:
        check_layouts(scenario, grouped_plan(scenario, [(4, PAIR)], (12,)), check_model(scenario))
    assert where in (refused.value.where or "")
    assert problem in str(refused.value)
    assert valid in str(refused.value)


@pytest.mark.parametrize(
    ("between", "whole"),
    [
        ("self.slope(self.wide(hidden))", "parameter 'slope.weight'"),
        ("torch.tanh(self.wide(hidden)) * self.gain", "parameter 'gain'"),
        # Zero, but autograd does not know.
        ("self.wide(hidden) + hidden.mean() * 0", "input"),
    ],
)
def test_what_is_whole_between_a_column_and_a_row_is_refused(between: str, whole: str, tmp_path: Path) -> None:
    """Else it would be trained by one part's gradient, in silence."""
    path = tmp_path / "model.py"
    own = "super().__init__()\n        self.gain, self.slope = nn.Parameter(torch.ones(1)), nn.PReLU()"
    path.write_text(MODEL.replace("super().__init__()", own).replace("torch.tanh(self.wide(hidden))", between))
    scenario = own_scenario(ModelCode(path, {}))
    with pytest.raises(InputError, match=f"the layer's {whole} is used on a part, between 'column' and 'row'") as found:
        check_layouts(scenario, grouped_plan(scenario, [(4, PAIR)], (12,)), check_model(scenario))
    assert found.value.where == f"{path}: parallel_layout(1)"


def test_heads_that_cannot_be_shared_are_refused() -> None:
    scenario = on_one_host(GPT, 4, degrees=(4,))
    with pytest.raises(InputError, match="layer 1 cannot be computed in 4 parts"):
        check_layouts(scenario, grouped_plan(scenario, [(6, [(4, 1.0)])], (12,)), check_model(scenario))


def test_a_model_without_a_layout_is_refused_before_anything_starts(tmp_path: Path) -> None:
    scenario = on_one_host(CONVOLUTIONAL, 2)
    write_resolved_scenario(scenario, tmp_path / "scenario.json")
    write_plan(grouped_plan(scenario, [(6, PAIR)], (12,)), tmp_path / "plan.json")
    done = ropebridge("run", "scenario.json", "--plan", "plan.json", "--compute", "real", "-o", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "the model has no parallel layout" in done.stderr
    assert "make a plan without 'partners'" in done.stderr
    assert not (tmp_path / "out").exists()


def refusal(scenario: Scenario, plan: Plan) -> InputError:
    check_supported(plan, scenario, "paced", "none")
    with pytest.raises(InputError) as refused:
        check_supported(plan, scenario, "real", "none")
    return refused.value


def test_replicas_of_different_degrees_are_refused() -> None:
    scenario = on_one_host(GPT, 5)
    refused = refusal(scenario, grouped_plan(scenario, [(2, [(1, 1.0)]), (4, [(2, 1.0), (1, 1.0)])], (12,)))
    assert refused.where == "pipelines[0].stages[1].replicas[1].partners"
    assert "1 devices share layer 2, but 2 devices share the layer in pipelines[0].stages[1].replicas[0]" in str(
        refused
    )


def test_updates_without_waiting_are_refused() -> None:
    scenario = on_one_host(GPT, 4)
    plan = grouped_plan(scenario, [(6, [(2, 1.0), (2, 1.0)])], (12,))
    stage = plan.pipelines[0].stages[0]
    each = tuple(Pipeline((replace(stage, replicas=(replica,)),), (6,)) for replica in stage.replicas)
    refused = refusal(scenario, replace(plan, pipelines=each, synchronisation=Synchronisation("asgd")))
    assert (refused.where, "method 'asgd'" in str(refused)) == ("pipelines[0].stages[0].replicas[0].partners", True)


class Halves:
    """One of two devices, without the other one."""

    degree = 2

    def __init__(self, place: int) -> None:
        self._place = place

    def shard(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        return whole.chunk(2, dimension)[self._place]

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def total(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs


def test_shards_are_small_plain_parameters_under_the_names_of_the_whole_layer() -> None:
    whole, *halves = (load_with_sizes(GPT, seed=0).model for _ in range(3))
    for place, half in enumerate(halves):
        shard_layer(half.layers[1], half.parallel_layout(1), Halves(place))
    held = [{part.name: part for part in parameter_parts(half.layers[1])} for half in halves]
    for name, parameter in whole.layers[1].named_parameters():
        found = [each[name] for each in held]
        assert all(type(part.parameter) is nn.Parameter for part in found)
        dimension = found[0].dimension
        if dimension is None:
            assert torch.equal(found[0].parameter, parameter)
        else:
            assert torch.equal(torch.cat([part.parameter for part in found], dimension), parameter)
            assert found[0].parameter.untyped_storage().nbytes() == parameter.nbytes // 2
    cut = [module for module in halves[0].layers[1].modules() if isinstance(module, ShardedModule)]
    # So a backward can be split here too.
    assert [splittable(module.shard) is not None for module in cut] == [True] * 4
    assert [len(each) for each in held] == [len(list(whole.layers[1].parameters()))] * 2


def test_the_profile_of_the_example_is_right() -> None:
    scenario = on_one_host(GPT, 2)
    check_layouts(scenario, grouped_plan(scenario, [(6, PAIR)], (12,)), check_model(scenario))


@pytest.mark.parametrize("option", ["max_norm=0.5", "scale_grad_by_freq=True"])
def test_what_parts_of_a_table_would_not_have_is_refused(option: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    table = f"self.wide, self.norm, self.narrow = nn.Embedding(10, 6, {option}), nn.LayerNorm(6), nn.Linear(width, 6)"
    made = MODEL.replace(
        "self.wide, self.norm, self.narrow = nn.Linear(6, width, bias=False), nn.LayerNorm(6), nn.Linear(width, 6)",
        table,
    ).replace("torch.tanh(self.wide(hidden))", "torch.tanh(hidden)")
    path.write_text(made)
    layer = load_model(ModelCode(path, {}), 0).layers[1]
    with pytest.raises(InputError, match="submodule 'wide' cannot be sharded as it is"):
        _check_names(layer, {"wide": "vocabulary"}, 2, str(path))
