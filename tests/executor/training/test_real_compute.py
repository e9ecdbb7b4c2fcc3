"""Every action that a plan can say, computed for real by all ranks in one process, trains as one process does."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from executor.training.models.loading import check_model, load_model
from executor.training.stage_module import StageModule
from experiments.benches.execution.equal_training import in_precision
from planner.plan.actions import parse_action
from planner.plan.plan import EXPLICIT, Plan
from planner.scenario.scenario import ModelCode
from planner.scenario.training import LearningRateSchedule, Optimizer
from tests.helpers.processes.all_ranks import train_on_all_ranks
from tests.helpers.processes.training import (
    CONVOLUTIONAL,
    GPT,
    Trained,
    hybrid_plan,
    placed_plan,
    train_in_one_process,
    training_scenario,
)

STEPS = 3
# Of learning rates that change from step to step.
SCHEDULED_STEPS = 5
TOLERANCE = 1e-6
CODES = {"gpt": GPT, "convolutional": CONVOLUTIONAL}
LAYERS = 6

# (Layers, worker) of each stage.
STRAIGHT = ((1, 0), (2, 1), (3, 2))
LOOPED = ((1, 0), (2, 1), (1, 0), (2, 1))
V = ((1, 0), (2, 1), (1, 1), (2, 0))
SCATTERED = ((1, 0), (1, 1), (2, 1), (1, 0), (1, 1))

ONE_EACH = ([1.0], [1.0], [1.0])
# The first takes no sample of a small microbatch.
UNEQUAL = ([1.0, 4.0], [1.0], [2.0, 1.0])

# Schedule, stages, shares of the workers' replicas, microbatches, stages that recompute.
PLANS = [
    pytest.param("gpipe", STRAIGHT, UNEQUAL, (1, 5, 4, 2), (), id="gpipe"),
    pytest.param("gpipe", STRAIGHT, ONE_EACH, (4, 4, 4), (0, 1, 2), id="gpipe-recomputing"),
    pytest.param("1f1b", STRAIGHT, UNEQUAL, (5, 4, 3), (1,), id="1f1b"),
    pytest.param("1f1b", STRAIGHT, ONE_EACH, (12,), (), id="1f1b-of-whole-batches"),
    pytest.param("interleaved-1f1b", LOOPED, UNEQUAL, (5, 1, 4, 2), (), id="interleaved-1f1b"),
    pytest.param("interleaved-1f1b", LOOPED, ONE_EACH, (3, 3, 3, 3), (0, 3), id="interleaved-1f1b-recomputing"),
    pytest.param("zb-h1", STRAIGHT, UNEQUAL, (1, 5, 4, 2), (0, 2), id="zb-h1"),
    pytest.param("zb-h2", STRAIGHT, UNEQUAL, (5, 4, 3), (), id="zb-h2"),
    pytest.param("zb-h2", STRAIGHT, ONE_EACH, (3, 3, 3, 3), (0, 1, 2), id="zb-h2-recomputing"),
    pytest.param("zb-v", V, UNEQUAL, (1, 5, 4, 2), (), id="zb-v"),
    pytest.param("zb-v", V, ONE_EACH, (4, 4, 4), (1, 2, 3), id="zb-v-recomputing"),
    pytest.param("compact-zb", V, UNEQUAL, (5, 4, 3), (1,), id="compact-zb"),
    pytest.param("compact-zb", SCATTERED, ONE_EACH, (4, 4, 4), (), id="compact-zb-scattered"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are too small for more, and threads that wait for each other are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def in_one_process(code: str) -> Trained:
    """Whatever the number of devices of a scenario."""
    return train_in_one_process(training_scenario(CODES[code], 1), STEPS)


def assert_equal(trained: Trained, expected: Trained, tolerance: float = TOLERANCE) -> None:
    assert trained.parameters.keys() == expected.parameters.keys()
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(torch.tensor(trained.losses), torch.tensor(expected.losses), **near)
    torch.testing.assert_close(dict(trained.parameters), dict(expected.parameters), **near)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("schedule", "stages", "shares", "microbatches", "recompute"), PLANS)
def test_every_schedule_trains_as_one_process(
    schedule: str,
    stages: Sequence[tuple[int, int]],
    shares: Sequence[Sequence[float]],
    microbatches: Sequence[int],
    recompute: Sequence[int],
    code: str,
) -> None:
    workers = shares[: 1 + max(worker for _, worker in stages)]
    scenario = training_scenario(CODES[code], sum(map(len, workers)))
    plan = placed_plan(scenario, schedule, stages, workers, microbatches, recompute=recompute)
    assert_equal(train_on_all_ranks(scenario, plan, STEPS), in_one_process(code))


@settings(max_examples=8)
@given(st.data())
def test_any_placement_without_a_fixed_order(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, LAYERS - 1), max_size=4)))
    layers = [end - first for first, end in zip([0, *cuts], [*cuts, LAYERS], strict=True)]
    shares = data.draw(
        st.lists(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=2), max_size=3, min_size=1)
    )
    shares = shares[: len(layers)]
    workers = [*range(len(shares)), *(data.draw(st.integers(0, len(shares) - 1)) for _ in layers[len(shares) :])]
    microbatches = data.draw(st.permutations([1, 5, 4, 2]) | st.just([12]) | st.just([3, 9]))
    recompute = data.draw(st.sets(st.integers(0, len(layers) - 1)))
    scenario = training_scenario(GPT, sum(map(len, shares)))
    plan = placed_plan(
        scenario,
        data.draw(st.sampled_from(["1f1b", "compact-zb"])),
        list(zip(layers, workers, strict=True)),
        shares,
        microbatches,
        recompute=recompute,
        in_flight=data.draw(st.integers(1, 3)),
    )
    trained = train_on_all_ranks(scenario, replace(plan, order="dynamic"), 2, seed=data.draw(st.integers(0, 9)))
    assert_equal(trained, train_in_one_process(scenario, 2))


def explicit(plan: Plan, orders: Sequence[str]) -> Plan:
    parsed = tuple(tuple(parse_action(action) for action in order.split()) for order in orders)
    return replace(plan, schedule=EXPLICIT, pipelines=(replace(plan.pipelines[0], orders=parsed),))


def test_microbatches_out_of_order_and_backwards_of_both_kinds() -> None:
    scenario = training_scenario(GPT, 2)
    plan = placed_plan(scenario, EXPLICIT, [(2, 0), (4, 1)], [[1.0], [1.0]], (5, 4, 3))
    orders = ["0F2 0F0 0F1 0B1 0I2 0B0 0W2", "1F0 1F2 1F1 1I1 1B2 1W1 1I0 1W0"]
    assert_equal(train_on_all_ranks(scenario, explicit(plan, orders), STEPS), in_one_process("gpt"))


def test_two_unlike_pipelines() -> None:
    scenario = training_scenario(GPT, 4)
    plan = hybrid_plan(scenario, "zb-h1", [([(2, [1.0]), (4, [1.0, 3.0])], [3, 4]), ([(6, [1.0])], [5])])
    assert_equal(train_on_all_ranks(scenario, plan, STEPS), in_one_process("gpt"))


def test_a_plan_that_changes_between_steps() -> None:
    scenario = training_scenario(CONVOLUTIONAL, 2)
    ways = [("1f1b", (4, 4, 4), ()), ("zb-h1", (1, 5, 6), (0,)), ("zb-h2", (12,), (0, 1)), ("gpipe", (7, 5), ())]

    def plan_of(step: int) -> Plan:
        schedule, microbatches, recompute = ways[step % len(ways)]
        stages = [(2, 0), (4, 1)]
        return placed_plan(scenario, schedule, stages, [[1.0], [1.0]], microbatches, recompute=recompute)

    assert_equal(train_on_all_ranks(scenario, plan_of, 6), train_in_one_process(scenario, 6))


LINEAR_FALL = LearningRateSchedule("linear", warmup_steps=2, decay_steps=4, final_share=0.1)
COSINE_FALL = LearningRateSchedule("cosine", decay_steps=3)


# AdamW divides by the gradient's own size: rounding in a gradient near zero moves a parameter by a share of the
# learning rate, so its difference is about the learning rate times 1e-4, whatever the gradient.
@pytest.mark.parametrize(
    ("rule", "clip_norm", "tolerance"),
    [
        pytest.param(Optimizer("sgd", 0.1), 0.05, TOLERANCE, id="clipped-in-every-step"),
        pytest.param(Optimizer("momentum", 0.1, weight_decay=0.01, schedule=LINEAR_FALL), None, TOLERANCE, id="linear"),
        pytest.param(Optimizer("momentum", 0.05, schedule=COSINE_FALL), 1e6, TOLERANCE, id="cosine-and-never-clipped"),
        pytest.param(Optimizer("adamw", 0.001, weight_decay=0.01, schedule=COSINE_FALL), 0.5, 5e-6, id="adamw"),
    ],
)
def test_update_rules(rule: Optimizer, clip_norm: float | None, tolerance: float) -> None:
    scenario = training_scenario(CONVOLUTIONAL, 5, optimizer=rule)
    scenario = replace(scenario, training=replace(scenario.training, clip_norm=clip_norm))
    pipelines = [([(1, [1.0, 2.0]), (5, [1.0])], [4, 3]), ([(3, [1.0]), (3, [1.0])], [2, 3])]
    plan = hybrid_plan(scenario, "zb-h1", pipelines)
    trained = train_on_all_ranks(scenario, plan, SCHEDULED_STEPS)
    assert_equal(trained, train_in_one_process(scenario, SCHEDULED_STEPS), tolerance)


def test_clipping_scales_alike_however_the_layers_are_cut() -> None:
    """To the last bit: what stages add up to must not follow from where they are cut."""
    scenario = training_scenario(GPT, 3)
    scenario = replace(scenario, training=replace(scenario.training, clip_norm=0.05))
    found = []
    for stages in ([6], [2, 4], [1, 3, 2]):
        plan = hybrid_plan(scenario, "1f1b", [([(layers, [1.0]) for layers in stages], [5, 4, 3])])
        found.append(train_on_all_ranks(scenario, plan, STEPS).parameters)
    for parameters in found[1:]:
        torch.testing.assert_close(dict(parameters), dict(found[0]), rtol=0, atol=0)


@pytest.mark.parametrize("code", CODES)
def test_mixed_precision_is_near_one_process_under_autocast(code: str) -> None:
    exact = training_scenario(CODES[code], 2, optimizer=Optimizer("sgd", 0.05))
    scenario, steps = in_precision(exact, "bf16"), 8
    plan = placed_plan(scenario, "zb-v", V, [[1.0], [1.0]], (5, 4, 3), recompute=(1, 2))
    trained, expected = train_on_all_ranks(scenario, plan, steps), train_in_one_process(scenario, steps)
    assert all(value.dtype == torch.float32 for value in trained.parameters.values())
    # bfloat16 has 8 bits: a number is rounded by up to 0.4 %.
    assert_equal(trained, expected, tolerance=0.02)
    assert trained.losses[-1] < trained.losses[0]
    assert trained.losses != train_on_all_ranks(exact, plan, steps).losses, "float32 was computed in"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_mixed_precision_does_not_depend_on_where_the_layers_are_cut(schedule: str) -> None:
    scenario = in_precision(training_scenario(GPT, 3), "bf16")
    found = []
    for stages in ([6], [2, 4], [1, 3, 2]):
        plan = hybrid_plan(scenario, schedule, [([(layers, [1.0]) for layers in stages], [5, 4, 3])])
        found.append(train_on_all_ranks(scenario, plan, STEPS).parameters)
    for parameters in found[1:]:
        torch.testing.assert_close(dict(parameters), dict(found[0]), rtol=0, atol=0)


MODEL = """
import torch
from torch import nn

class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
    def forward(self, hidden):
        return self.scale * self.inner(torch.tanh(self.inner(hidden)))

class AddsInPlace(nn.Module):
    def forward(self, hidden):
        hidden += 1
        return hidden

class Model:
    def __init__(self, dropout):
        frozen = nn.Linear(6, 6)
        frozen.weight.requires_grad_(False)
        unused = nn.Linear(6, 6)
        unused.more = nn.Linear(2, 2)
        self.layers = [nn.Tanh(), nn.Linear(3, 6), AddsInPlace(), Shared(), nn.ReLU(inplace=True), frozen,
                       nn.Identity(), unused, nn.Dropout(dropout), nn.Linear(6, 1)]
        self.inputs = torch.randn(7, 3)
        self.size = 7
    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)
    def select(self, indices):
        return self.inputs[indices], self.inputs[indices].sum(1, keepdim=True)

def build(dropout=0.0):
    return Model(dropout)
"""


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> ModelCode:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(MODEL)
    return ModelCode(path, {})


@pytest.mark.parametrize("recompute", [(), tuple(range(10))], ids=["kept", "recomputed"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_layers_that_are_hard_to_cut_and_a_data_set_smaller_than_a_batch(
    schedule: str, recompute: tuple[int, ...], own_model: ModelCode
) -> None:
    scenario = training_scenario(own_model, 12)
    stages = [(1, worker) for worker in range(10)]
    shares = [[1.0, 2.0] if worker in (3, 5) else [1.0] for worker in range(10)]
    plan = placed_plan(scenario, schedule, stages, shares, (5, 4, 3), recompute=recompute)
    assert_equal(train_on_all_ranks(scenario, plan, STEPS), train_in_one_process(scenario, STEPS))


def test_random_numbers_are_those_of_the_place_in_the_run(own_model: ModelCode) -> None:
    scenario = training_scenario(replace(own_model, arguments={"dropout": 0.5}), 2)

    def plan(schedule: str, recompute: Sequence[int]) -> Plan:
        return placed_plan(scenario, schedule, [(3, 0), (7, 1)], [[1.0], [1.0]], (5, 4, 3), recompute=recompute)

    trained = train_on_all_ranks(scenario, plan("gpipe", ()), STEPS)
    assert_equal(train_on_all_ranks(scenario, plan("zb-h1", (0, 1)), STEPS, seed=1), trained)
    certain = train_in_one_process(replace(scenario, code=own_model), STEPS)
    assert trained.losses != pytest.approx(certain.losses, rel=0.01)


CHANCE = """
import random
import numpy as np
import torch
from torch import nn

class Model:
    def __init__(self):
        first = nn.Linear(1, 2)
        with torch.no_grad():
            first.weight.copy_(torch.tensor([[random.random()], [np.random.random()]]))
        self.layers = [first, nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(2, 1)), nn.Linear(1, 1)]
    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)
    def samples(self, first, count):
        return torch.ones(count, 1), torch.ones(count, 1)

def build():
    return Model()
"""


def test_weights_drawn_by_any_package_follow_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(CHANCE)
    drawn = []
    for chance, seed in ((1, 5), (2, 5), (2, 6)):
        random.seed(chance)
        np.random.seed(chance)
        drawn.append(load_model(ModelCode(path, {}), seed).layers[0].get_parameter("weight").flatten().tolist())
    assert drawn[0] == drawn[1]
    assert not set(drawn[1]) & set(drawn[2])


@pytest.mark.parametrize("recompute", [(), (0, 1)])
def test_a_stage_may_begin_with_a_layer_that_changes_its_input_only_while_it_trains(
    recompute: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(CHANCE)
    scenario = training_scenario(ModelCode(path, {}), 2)
    assert [size.changes_inputs for size in check_model(scenario).sizes] == [False, True, False]
    plan = placed_plan(scenario, "1f1b", [(1, 0), (2, 1)], [[1.0], [1.0]], (6, 6), recompute=recompute)
    assert len(train_on_all_ranks(scenario, plan, STEPS).losses) == STEPS


@pytest.mark.parametrize("momentum", [0.1, None])
def test_recomputation_leaves_the_statistics_of_batch_norm_alone(momentum: float | None) -> None:
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4, momentum=momentum)
        stage = StageModule([nn.Linear(4, 4), norm], torch.device("cpu"), "fp32", copies_inputs=False)
        stage.start_step(recompute=recompute, splits=False)
        for microbatch in range(3):
            rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(microbatch))
            stage.forward(microbatch, rows, lambda outputs: outputs.square().mean())
            stage.backward(microbatch, None)
        found.append(norm)
    kept, again = found
    assert int(again.num_batches_tracked) == 3
    assert torch.equal(kept.running_mean, again.running_mean)
    assert torch.equal(kept.running_var, again.running_var)
    assert again.momentum == momentum
