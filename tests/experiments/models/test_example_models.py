import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from experiments.scenarios import READY_FOLDER
from planner.files.scenario import read_scenario

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[3] / "experiments" / "models"
SMALL: dict[str, dict[str, int]] = {
    "gpt": {"vocabulary": 64, "width": 32, "heads": 2, "blocks": 2, "length": 16},
    "convolutional": {"width": 8, "scales": 2, "side": 16, "classes": 4},
    "digits": {"width": 64, "depth": 2},
}

LEARNING_RATES = {"gpt": 1e-3, "convolutional": 1e-3, "digits": 1e-2}

every_model = pytest.mark.parametrize("name", SMALL)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads wait for each other on a busy machine, for longer than layers this small take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(name: str) -> Callable[..., Any]:
    """Load a model file by its path, as a run does."""
    spec = importlib.util.spec_from_file_location(f"user_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build: Callable[..., Any] = module.build
    return build


def forward(model: Any, inputs: Any) -> Any:
    for layer in model.layers:
        inputs = layer(inputs)
    return inputs


def samples(model: Any, first: int, count: int) -> tuple[Any, Any]:
    """Inputs and targets, of an endless stream or of a finite data set."""
    pair: tuple[Any, Any] = (
        model.samples(first, count) if hasattr(model, "samples") else model.select(torch.arange(first, first + count))
    )
    return pair


def parameters(model: Any) -> list[Any]:
    return [parameter for layer in model.layers for parameter in layer.parameters()]


@every_model
@pytest.mark.parametrize("size", ["small", "default"])
def test_the_loss_falls_within_ten_steps(name: str, size: str) -> None:
    torch.manual_seed(0)
    model = load(name)(**SMALL[name] if size == "small" else {})
    optimizer = torch.optim.AdamW(parameters(model), lr=LEARNING_RATES[name])
    losses = []
    for step in range(10):
        inputs, targets = samples(model, step * 16, 16)
        loss = model.loss(forward(model, inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert mean(losses[-3:]) < 0.9 * losses[0]


@every_model
def test_a_sample_depends_on_its_number_alone(name: str) -> None:
    whole = samples(load(name)(**SMALL[name]), 5, 12)
    model = load(name)(**SMALL[name])
    parts = [samples(model, 5, 1), samples(model, 6, 4), samples(model, 10, 7)]
    for tensors, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(tensors), expected)
    assert not torch.equal(whole[0][0], whole[0][1])


@every_model
def test_drawing_samples_leaves_the_random_state_alone(name: str) -> None:
    model = load(name)(**SMALL[name])
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    samples(model, 0, 4)
    assert torch.equal(torch.rand(1), expected)


@every_model
def test_gradients_of_microbatches_add_up_to_those_of_the_batch(name: str) -> None:
    torch.manual_seed(0)
    model = load(name)(**SMALL[name])

    def gradients(microbatches: list[tuple[int, int]]) -> list[Any]:
        for parameter in parameters(model):
            parameter.grad = None
        for first, count in microbatches:
            inputs, targets = samples(model, first, count)
            (model.loss(forward(model, inputs), targets) * count / 8).backward()
        return [parameter.grad for parameter in parameters(model)]

    for whole, split in zip(gradients([(0, 8)]), gradients([(0, 3), (3, 5)]), strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)


@every_model
def test_one_seed_gives_one_set_of_parameters(name: str) -> None:
    def build(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return parameters(load(name)(**SMALL[name]))

    assert all(torch.equal(one, other) for one, other in zip(build(1), build(1), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(build(1), build(2), strict=True))


@every_model
def test_shapes_are_found_without_computing(name: str) -> None:
    with torch.device("meta"):
        model = load(name)()
    assert all(parameter.is_meta for parameter in parameters(model))
    inputs, targets = samples(model, 0, 3)
    real = load(name)()
    meta = inputs.to("meta")
    for meta_layer, layer in zip(model.layers, real.layers, strict=True):
        meta, inputs = meta_layer(meta), layer(inputs)
        assert meta.is_meta
        assert (meta.shape, meta.dtype) == (inputs.shape, inputs.dtype)
    assert real.loss(inputs, targets).shape == ()


@every_model
def test_layer_count_follows_the_arguments(name: str) -> None:
    layers = {"gpt": 4, "convolutional": 6, "digits": 3}
    assert len(load(name)(**SMALL[name]).layers) == layers[name]


@pytest.mark.parametrize("name", ["gpt", "convolutional"])
def test_sizes_that_do_not_fit_together_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"width \(33\) must be a multiple of"):
        load(name)(**SMALL[name] | {"width": 33})


def test_the_digits_are_the_ready_scenarios_layers() -> None:
    scenario = read_scenario(READY_FOLDER / "digits.yaml")
    assert scenario.code is not None
    model = load("digits")(**scenario.code.arguments)
    assert len(model.layers) == len(scenario.model.layers)
    values, _ = samples(model, 0, 1)
    for layer, profile in zip(model.layers, scenario.model.layers, strict=True):
        values = layer(values)
        assert sum(parameter.nbytes for parameter in layer.parameters()) == profile.parameter_bytes
        assert values.nbytes == profile.output_bytes


def test_the_ready_scenario_learns_the_digits() -> None:
    scenario = read_scenario(READY_FOLDER / "digits.yaml")
    torch.manual_seed(scenario.training.seed)
    model = load("digits")()
    untrained = model.accuracy(model.layers)
    optimizer = torch.optim.SGD(parameters(model), lr=scenario.training.optimizer.learning_rate)
    batch = scenario.training.global_batch
    for step in range(400):
        indices = torch.arange(step * batch, (step + 1) * batch) % model.size
        inputs, targets = model.select(indices)
        optimizer.zero_grad()
        model.loss(forward(model, inputs), targets).backward()
        optimizer.step()
    assert untrained < 0.4
    assert model.accuracy(model.layers) > 0.93


@pytest.mark.slow
def test_the_digits_are_those_that_scikit_learn_gives() -> None:
    from sklearn.datasets import load_digits

    images, _ = load_digits(return_X_y=True)
    model = load("digits")()
    found = [values.at(slice(None))[0] for values in (model._training, model._held_out)]
    assert sorted(torch.cat(found).tolist()) == sorted((images / 16).tolist())


def test_held_out_digits_are_not_trained_on() -> None:
    model, twin = load("digits")(), load("digits")()
    assert model.size == 1438
    inputs, targets = model.select(torch.arange(model.size))
    for index in (model.size, 1796):
        with pytest.raises(IndexError):
            model.select(torch.tensor([index]))
    # The split is the same each time, and every class is in both parts.
    assert torch.equal(inputs, twin.select(torch.arange(model.size))[0])
    assert set(targets.tolist()) == set(range(10))
    assert inputs.min() == 0
    assert inputs.max() == 1


def test_accuracy_is_the_share_of_right_answers() -> None:
    model = load("digits")()

    class Always(torch.nn.Module):
        def __init__(self, answer: int) -> None:
            super().__init__()
            self.answer = answer

        def forward(self, images: Any) -> Any:
            return torch.nn.functional.one_hot(torch.full((len(images),), self.answer), 10).float()

    assert sum(model.accuracy([Always(answer)]) for answer in range(10)) == pytest.approx(1)


def test_digits_without_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        load("digits")(depth=0)
