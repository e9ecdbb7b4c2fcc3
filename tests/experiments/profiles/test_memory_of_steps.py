"""The memory that a plan predicts from a profile of the layers, against the peak of torch in its steps."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from executor.profiling.layer_memory import activations_bytes, layer_memory, peak_on_cpu
from executor.training.data.order import DataOrder
from executor.training.device import CPU
from executor.training.models.loading import LoadedModel, load_with_sizes
from executor.training.models.precision import shared_copies
from executor.training.optimizer import UpdateRule
from executor.training.stage_module import Loss, StageModule
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer, Training
from planner.schedules.kernel.problem import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from planner.step.compile import compile_step
from planner.step.memory import peak_bytes
from planner.step.orders import with_schedule
from tests.helpers.processes.training import MODELS

MICROBATCH, MICROBATCHES = 16, 4
ARGUMENTS: Mapping[str, Mapping[str, int]] = {
    "gpt": {"vocabulary": 64, "width": 64, "heads": 4, "blocks": 4, "length": 32},
    "digits": {"width": 128, "depth": 5},
    "convolutional": {"width": 16, "scales": 3, "side": 16, "classes": 4},
}


def profiled(loaded: LoadedModel, training: Training) -> ModelProfile:
    """Return the model with measured memory and any times, since no number of bytes depends on them."""
    saved = activations_bytes(loaded, training)
    times = {"cpu": TimeTable((1,), (1.0,), (1.0,), (1.0,))}
    return ModelProfile(
        "model",
        tuple(
            LayerProfile(
                str(layer),
                size.parameter_bytes,
                size.output.size_bytes,
                saved[layer].activation,
                times,
                memory=layer_memory(loaded, layer, saved[layer], training, CPU),
            )
            for layer, size in enumerate(loaded.sizes)
        ),
    )


def step_peak_bytes(loaded: LoadedModel, plan: Plan, scenario: Scenario, actor: int) -> int:
    """Return the peak of what one device of a plan allocates in a step, which updates the parameters too.

    What other devices send is zero.
    """
    training, sizes = scenario.training, loaded.sizes
    stage, step = plan.stages[actor], compile_step(plan, scenario)
    own = slice(*step.graph.first_action[actor : actor + 2].tolist())
    actions = list(zip(step.actions.kind[own].tolist(), step.actions.microbatch[own].tolist(), strict=True))
    layers = [loaded.model.layers[layer] for layer in stage.layers]
    copies = any(sizes[layer].changes_inputs for layer in stage.layers)
    module = StageModule(layers, CPU, training.precision, copies_inputs=copies)
    parameters: list[nn.Parameter] = [each for layer in layers for each in layer.parameters()]
    rule, data = UpdateRule(parameters, training), DataOrder(loaded.data, training.seed)

    def received(layer: int) -> torch.Tensor:
        shape = sizes[layer].output
        return torch.zeros(MICROBATCH, *shape.sizes, dtype=shape.dtype)

    def act(kind: int, microbatch: int) -> None:
        last = stage.end_layer == len(sizes)
        if kind == FORWARD:
            inputs, targets = data.samples(MICROBATCH * microbatch, MICROBATCH)
            if stage.first_layer:
                inputs = received(stage.first_layer - 1).requires_grad_()
            loss: Loss | None = (lambda outputs: loaded.model.loss(outputs, targets)) if last else None
            module.forward(microbatch, inputs, loss)
        elif kind == BACKWARD_WEIGHT:
            module.backward_weight(microbatch)
        else:
            assert kind in (BACKWARD, BACKWARD_INPUT)
            run = module.backward if kind == BACKWARD else module.backward_input
            run(microbatch, None if last else received(stage.end_layer - 1))

    def work() -> None:
        module.start_step(recompute=False, splits=any(kind == BACKWARD_INPUT for kind, _ in actions))
        rule.clear_gradients()
        with shared_copies():
            for kind, microbatch in actions:
                if kind <= BACKWARD_WEIGHT:
                    act(kind, microbatch)
        rule.update(0.1, None)

    work()
    rule.clear_gradients()
    held = sum(each.nbytes + rule.state_bytes(each) for each in parameters)
    return held + peak_on_cpu(work)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plan_needs_as_much_memory_as_its_steps(name: str, precision: str, schedule: str) -> None:
    code = ModelCode(MODELS / f"{name}.py", ARGUMENTS[name])
    training = Training(MICROBATCH * MICROBATCHES, optimizer=Optimizer("adamw", 1e-3), precision=precision)
    loaded = load_with_sizes(code, training.seed, precision)
    devices = tuple(Device(f"device-{place}", "cpu", "here", 2**34) for place in range(2))
    cluster = Cluster(devices, (Link("here", "here", 1e9, 0.0),))
    scenario = Scenario("memory", cluster, profiled(loaded, training), training)
    middle, end = len(loaded.sizes) // 2, len(loaded.sizes)
    stages = (Stage(0, middle, (Replica("device-0"),), 2), Stage(middle, end, (Replica("device-1"),), 1))
    plan = Plan("memory", "model", "hand", "1f1b", (Pipeline(stages, (MICROBATCH,) * MICROBATCHES),))
    plan = with_schedule(plan, scenario, schedule)
    predicted = peak_bytes(plan, scenario)
    measured = {f"device-{actor}": step_peak_bytes(loaded, plan, scenario, actor) for actor in range(2)}
    errors = {device: predicted[device] / measured[device] - 1 for device in measured}
    assert {device: error for device, error in errors.items() if abs(error) > 0.05} == {}
