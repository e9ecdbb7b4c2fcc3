"""Pipelines that do not wait for each other: every number against the recursion, with arrivals that the test chooses.

And for real: what is the same whatever the timing, what the simulator says of the same timing, and what is learnt.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.training.models.loading import load_model
from planner.check import check_plan
from planner.events.event import Event, EventKind
from planner.files.scenario import read_scenario
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.runs.metrics import measure
from planner.runs.record import Backend, RunRecord
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer
from sim.simulator import Simulator
from tests.helpers.processes.asynchronous import Recursion, in_step
from tests.helpers.processes.training import hybrid_plan, train_in_one_process, training_scenario
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from tests.helpers.strategies.manual_transport import Pipelines
from tests.helpers.strategies.scripted_policy import Scripted

TOLERANCE = 1e-6
METHODS = [("asgd", 1), ("asgd-ga", 1), ("asgd-ga", 2), ("asgd-ga", 3), ("ma", 1), ("ma", 2)]

MODEL = """
import torch
from torch import nn

class Model:
    def __init__(self):
        self.layers = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 1)]
    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)
    def samples(self, first, count):
        x = torch.arange(first, first + count).unsqueeze(1) * torch.tensor([0.1, 0.2, 0.3])
        return torch.sin(x), torch.cos(x).mean(1, keepdim=True)

def build():
    return Model()
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> ModelCode:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(MODEL)
    return ModelCode(path, {})


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def scenario_of(code: ModelCode, devices: int, clip_norm: float | None = None) -> Scenario:
    places = [f"region-{index}" for index in range(devices)]
    scenario = training_scenario(code, devices, optimizer=Optimizer("sgd", 0.2), regions=places)
    return replace(scenario, training=replace(scenario.training, clip_norm=clip_norm))


def synchronised(plan: Plan, method: str, every: int, bound: int | None = None) -> Plan:
    return replace(plan, synchronisation=Synchronisation(method, interval_steps=every, staleness_bound=bound))


def alone(scenario: Scenario, samples: Sequence[int]) -> Plan:
    """A device for each pipeline; the second one cuts the layers into two stages."""
    pipelines = []
    for index, (device, count) in enumerate(zip(scenario.cluster.devices, samples, strict=True)):
        cuts = [(0, 1), (1, 4)] if index == 1 else [(0, 4)]
        stages = tuple(Stage(first, end, (Replica(device.name),), 2) for first, end in cuts)
        pipelines.append(Pipeline(stages, (count - 1, 1)))
    return Plan(scenario.name, scenario.model.name, "hand", "compact-zb", tuple(pipelines))


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def play(happenings: Sequence[int], pipelines: Pipelines, recursion: Recursion, steps: int) -> None:
    """Let happen what the numbers say, as far as it can: a step of a pipeline, or an arrival; then all the rest."""
    count = len(recursion.pipelines)
    pairs = list(recursion.in_the_air)
    for happening in happenings:
        if happening < count:
            if recursion.pipelines[happening].step < steps:
                pipelines.step(happening)
                recursion.step(happening)
        elif recursion.in_the_air[pair := pairs[(happening - count) % len(pairs)]]:
            deliver(pipelines, recursion, pair)
    for p in range(count):
        while recursion.pipelines[p].step < steps:
            pipelines.step(p)
            recursion.step(p)
    pipelines.finish()
    recursion.finish()


def deliver(pipelines: Pipelines, recursion: Recursion, pair: tuple[int, int]) -> None:
    recursion.deliver(*pair)
    # A pipeline of two stages gets an update for each of them, and sends one for each.
    pipelines.deliver(*pair, messages=2 if 1 in pair else 1)


# --- in one process ---------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(data=st.data())
def test_any_timing_follows_the_recursion(data: st.DataObject, code: ModelCode) -> None:
    samples = data.draw(st.sampled_from([(6, 6), (9, 3), (5, 3, 4)]))
    method, every = data.draw(st.sampled_from(METHODS))
    clip_norm = data.draw(st.sampled_from([None, 0.05]))
    steps = data.draw(st.integers(1, 5))
    happenings = data.draw(st.lists(st.integers(0, 8), max_size=40))
    scenario = scenario_of(code, len(samples), clip_norm)
    plan = synchronised(alone(scenario, samples), method, every)
    check_plan(plan, scenario)
    pipelines, recursion = Pipelines(scenario, plan, steps), Recursion(scenario, plan)
    play(happenings, pipelines, recursion, steps)
    for p, compute in enumerate(pipelines.computes):
        assert_near(dict(compute.named_parameters()), dict(recursion.parameters(p)))
    if method != "ma" and clip_norm is None and steps % every == 0:
        # Everybody has applied every gradient once.
        for compute in pipelines.computes[1:]:
            assert_near(dict(compute.named_parameters()), dict(pipelines.computes[0].named_parameters()))


def test_sums_of_one_step_are_the_gradients_of_each_step(code: ModelCode) -> None:
    happenings = [0, 0, 2, 1, 0, 2, 2, 3, 1, 1, 3, 0]
    found = []
    for method in ("asgd", "asgd-ga"):
        scenario = scenario_of(code, 2)
        plan = synchronised(alone(scenario, (7, 5)), method, 1)
        pipelines = Pipelines(scenario, plan, 5)
        play(happenings, pipelines, Recursion(scenario, plan), 5)
        found.append([dict(compute.named_parameters()) for compute in pipelines.computes])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_averaging_equal_parameters_changes_nothing(code: ModelCode) -> None:
    scenario = scenario_of(code, 3)
    still = replace(scenario, training=replace(scenario.training, optimizer=Optimizer("sgd", 0.0)))
    pipelines = Pipelines(still, synchronised(alone(still, (4, 4, 4)), "ma", 1), 4)
    before = {name: value.clone() for name, value in pipelines.computes[0].named_parameters().items()}
    play([0, 1, 2, 3, 4, 5, 6, 7, 8] * 3, pipelines, Recursion(still, synchronised(alone(still, (4,) * 3), "ma", 1)), 4)
    for compute in pipelines.computes:
        torch.testing.assert_close(dict(compute.named_parameters()), before, rtol=0, atol=0)


def test_averaging_every_step_in_step_is_averaging_sgd(code: ModelCode) -> None:
    """With equal parts of the batch the mean of parameters after a step is a step by the mean gradient."""
    scenario = scenario_of(code, 3)
    plan = synchronised(alone(scenario, (4, 4, 4)), "ma", 1, bound=0)
    expected = train_in_one_process(scenario, 5).parameters
    for p in range(3):
        assert_near(dict(in_step(scenario, plan, 5).parameters(p)), dict(expected))
    pipelines = Pipelines(scenario, plan, 5)
    for _ in range(5):
        for p in range(3):
            pipelines.step(p)
        pipelines.network.deliver_all()
    pipelines.finish()
    for compute in pipelines.computes:
        assert_near(dict(compute.named_parameters()), dict(expected))


def test_a_row_says_when_an_update_arrived_and_when_it_was_applied(code: ModelCode) -> None:
    scenario = scenario_of(code, 2)
    pipelines = Pipelines(scenario, synchronised(alone(scenario, (6, 6)), "asgd", 1), 3)
    pipelines.clock.shows_s = 1.0
    pipelines.step(0)
    pipelines.step(1)
    pipelines.clock.shows_s = 2.0
    pipelines.deliver(0, 1, messages=2)
    pipelines.clock.shows_s = 3.0
    pipelines.step(1)
    rows = [event for event in pipelines.events if event.kind is EventKind.UPDATE]
    assert [(row.device, row.peer, row.step, row.start_s, row.end_s) for row in rows] == [
        ("device-1", "device-0", 0, 2.0, 3.0)
    ] * 2
    # Pipeline 1 had done a step when it arrived, of which its sender knew nothing.
    assert [row.staleness for row in rows] == [1, 1]
    assert [row.stage for row in rows] == [0, 1]


# --- in real processes ------------------------------------------------------------------------------------------


def trained(scenario: Scenario, plan: Plan, folder: Path, steps: int) -> tuple[RunRecord, dict[str, torch.Tensor]]:
    """The record, and the parameters of the last pipeline's last replicas."""
    target = folder / "parameters.safetensors"
    return TorchBackend("real", parameters=target).run(scenario, plan, None, steps), load_file(target)


@pytest.mark.parametrize(
    ("method", "every", "clip_norm", "pipelines"),
    [
        pytest.param(
            *("asgd", 1, 0.05, [([(1, [1.0]), (3, [1.0])], [4, 2]), ([(4, [1.0, 2.0])], [6])]),
            id="gradients-clipped-for-stages-and-replicas",
        ),
        pytest.param("ma", 2, None, [([(4, [1.0])], [7]), ([(1, [1.0]), (3, [1.0])], [3, 2])], id="parameters"),
    ],
)
def test_pipelines_in_step_do_not_depend_on_timing(
    method: str, every: int, clip_norm: float | None, pipelines: list, code: ModelCode, tmp_path: Path
) -> None:
    scenario = scenario_of(code, sum(len(shares) for stages, _ in pipelines for _, shares in stages), clip_norm)
    plan = synchronised(hybrid_plan(scenario, "1f1b", pipelines), method, every, bound=0)
    record, parameters = trained(scenario, plan, tmp_path, 6)
    expected = in_step(scenario, plan, 6)
    assert_near(parameters, dict(expected.parameters(1)))
    assert record.losses == pytest.approx(expected.losses, rel=TOLERANCE)


@pytest.mark.slow
def test_replicas_stay_equal_where_nothing_comes_at_the_end(code: ModelCode, tmp_path: Path) -> None:
    """The last round is applied before the last step: the update after it must not move those by momentum alone."""
    found = []
    for shares in ([1.0], [1.0, 2.0]):
        scenario = scenario_of(code, 1 + len(shares))
        training = replace(scenario.training, optimizer=Optimizer("momentum", 0.05, weight_decay=0.1))
        scenario = replace(scenario, training=training)
        plan = hybrid_plan(scenario, "1f1b", [([(4, [1.0])], [6]), ([(4, shares)], [6])])
        found.append(trained(scenario, synchronised(plan, "asgd-ga", 2, bound=0), tmp_path, 5)[1])
    assert_near(*found)


def apart(step_s: Sequence[float], transfer_s: float, latency_s: float) -> tuple[Scenario, Plan]:
    """Two pipelines of one device; an update takes ``transfer_s`` to leave and ``latency_s`` to arrive."""
    size_bytes = 40_000
    scenario = mesh_scenario(
        2,
        [1.0],
        [1.0],
        parameter_bytes=[size_bytes],
        link=lambda a, b: (8 * size_bytes / transfer_s, latency_s),
        global_batch=2,
        regions=["north", "south"],
    )
    (layer,) = scenario.model.layers
    (table,) = layer.times.values()
    kinds = [f"kind-{index}" for index in range(2)]
    times = {
        kind: replace(table, forward_s=(each / 2,), backward_input_s=(each / 4,), backward_weight_s=(each / 4,))
        for kind, each in zip(kinds, step_s, strict=True)
    }
    devices = tuple(replace(each, kind=kind) for each, kind in zip(scenario.cluster.devices, kinds, strict=True))
    scenario = replace(
        scenario,
        cluster=replace(scenario.cluster, devices=devices),
        model=replace(scenario.model, layers=(replace(layer, times=times),)),
    )
    return scenario, layered_plan(scenario, [([(1, 1, 1)], [1])] * 2)


def versions(events: Sequence[Event]) -> Counter[tuple[str, str, int, int]]:
    return Counter((e.device, e.peer, e.step, e.staleness) for e in events if e.kind is EventKind.UPDATE)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "steps"), [(1, 8), (2, 8)])
def test_versions_are_those_that_the_simulator_has(every: int, steps: int) -> None:
    """A slow and a fast pipeline: steps begin and end at multiples of 0.4 s, updates arrive 0.2 s after these."""
    scenario, plan = apart([0.4, 0.8], transfer_s=0.1, latency_s=0.1)
    plan = synchronised(plan, "asgd-ga", every)
    simulated = Simulator().run(scenario, plan, None, steps)
    record = TorchBackend("paced", emulator="shaper").run(scenario, plan, None, steps)
    assert versions(record.events) == versions(simulated.events)
    assert measure(record).wan_bytes == measure(simulated).wan_bytes == 2 * 40_000 * steps // every
    for event in record.events:
        if event.kind is EventKind.UPDATE:
            assert event.end_s >= event.start_s


@pytest.mark.parametrize("backend", [Simulator(), TorchBackend("paced", emulator="shaper")], ids=["simulated", "paced"])
def test_a_policy_holds_nobody_up_who_waits_for_no_update(backend: Backend) -> None:
    scenario, plan = apart([0.05, 0.05], transfer_s=2.0, latency_s=0.0)
    record = backend.run(scenario, synchronised(plan, "asgd-ga", 4), Scripted({}), 8)
    departed_s = min(e.end_s for e in record.events if e.kind is EventKind.SEND and e.step == 3)
    computed_s = max(e.end_s for e in record.events if e.kind is EventKind.COMPUTE and e.step == 7)
    assert computed_s < departed_s
    assert sum(e.kind is EventKind.UPDATE for e in record.events) == 4


# --- what is learnt ---------------------------------------------------------------------------------------------


DIGITS = Path(__file__).parents[3] / "experiments" / "scenarios" / "digits.yaml"
# Forty-five times through the data. Before, the accuracy of any training jumps by points from step to step.
DIGITS_STEPS = 1000
# Steps take 2 ms here and updates ten times as long: without a bound one side learns all it does before it hears of the
# other, and what arrives then is of a model that is long gone.
DIGITS_BOUND = 4


def accuracy(scenario: Scenario, parameters: dict[str, torch.Tensor]) -> float:
    assert scenario.code is not None
    model = load_model(scenario.code, scenario.training.seed)
    layers = torch.nn.Sequential(*model.layers)
    layers.load_state_dict(parameters)
    return model.accuracy(list(layers))  # type: ignore[attr-defined, no-any-return]


@cache
def accuracy_of_waiting(scenario: Scenario) -> float:
    """That of one process, which training that waits equals, as test_correctness_matrix.py shows."""
    return accuracy(scenario, dict(train_in_one_process(scenario, DIGITS_STEPS).parameters))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "every"), [("asgd", 1), ("asgd-ga", 4), ("ma", 4)])
def test_digits_are_learnt_as_well_as_in_step(method: str, every: int, tmp_path: Path) -> None:
    """Held-out accuracy after the same number of samples, within a point of that of training that waits."""
    scenario = read_scenario(DIGITS)
    half = scenario.training.global_batch // 2
    pipelines = [
        Pipeline((Stage(0, len(scenario.model.layers), (Replica(device.name),), 1),), (half,))
        for device in scenario.cluster.devices
    ]
    waiting = Plan(scenario.name, scenario.model.name, "hand", "1f1b", tuple(pipelines))
    target = tmp_path / "parameters.safetensors"
    backend = TorchBackend("real", emulator="shaper", parameters=target)
    backend.run(scenario, synchronised(waiting, method, every, DIGITS_BOUND), None, DIGITS_STEPS)
    expected = accuracy_of_waiting(scenario)
    found = accuracy(scenario, load_file(target))
    assert found > expected - 0.01, f"{found:.4f} instead of {expected:.4f}"
