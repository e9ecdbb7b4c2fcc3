import importlib.util
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "experiments" / "models"
SMALL: dict[str, dict[str, int]] = {
    "gpt": {"vocabulary": 64, "width": 32, "heads": 2, "blocks": 2, "length": 16},
    "convolutional": {"width": 8, "scales": 2, "side": 16, "classes": 4},
}

pytestmark = pytest.mark.parametrize("name", SMALL)


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


def parameters(model: Any) -> list[Any]:
    return [parameter for layer in model.layers for parameter in layer.parameters()]


@pytest.mark.parametrize("size", ["small", "default"])
def test_the_loss_falls_within_ten_steps(name: str, size: str) -> None:
    torch.manual_seed(0)
    model = load(name)(**SMALL[name] if size == "small" else {})
    optimizer = torch.optim.AdamW(parameters(model), lr=1e-3)
    losses = []
    for step in range(10):
        inputs, targets = model.samples(step * 16, 16)
        loss = model.loss(forward(model, inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert mean(losses[-3:]) < 0.9 * losses[0]


def test_a_sample_depends_on_its_number_alone(name: str) -> None:
    whole = load(name)(**SMALL[name]).samples(5, 12)
    model = load(name)(**SMALL[name])
    parts = [model.samples(5, 1), model.samples(6, 4), model.samples(10, 7)]
    for tensors, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(tensors), expected)
    assert not torch.equal(whole[0][0], whole[0][1])


def test_drawing_samples_leaves_the_random_state_alone(name: str) -> None:
    model = load(name)(**SMALL[name])
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    model.samples(0, 4)
    assert torch.equal(torch.rand(1), expected)


def test_gradients_of_microbatches_add_up_to_those_of_the_batch(name: str) -> None:
    torch.manual_seed(0)
    model = load(name)(**SMALL[name])

    def gradients(microbatches: list[tuple[int, int]]) -> list[Any]:
        for parameter in parameters(model):
            parameter.grad = None
        for first, count in microbatches:
            inputs, targets = model.samples(first, count)
            (model.loss(forward(model, inputs), targets) * count / 8).backward()
        return [parameter.grad for parameter in parameters(model)]

    for whole, split in zip(gradients([(0, 8)]), gradients([(0, 3), (3, 5)]), strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)


def test_one_seed_gives_one_set_of_parameters(name: str) -> None:
    def build(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return parameters(load(name)(**SMALL[name]))

    assert all(torch.equal(one, other) for one, other in zip(build(1), build(1), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(build(1), build(2), strict=True))


def test_shapes_are_found_without_computing(name: str) -> None:
    with torch.device("meta"):
        model = load(name)()
    assert all(parameter.is_meta for parameter in parameters(model))
    inputs, targets = model.samples(0, 3)
    real = load(name)()
    meta = inputs.to("meta")
    for meta_layer, layer in zip(model.layers, real.layers, strict=True):
        meta, inputs = meta_layer(meta), layer(inputs)
        assert meta.is_meta
        assert (meta.shape, meta.dtype) == (inputs.shape, inputs.dtype)
    assert real.loss(inputs, targets).shape == ()


def test_layer_count_follows_the_arguments(name: str) -> None:
    layers = {"gpt": 4, "convolutional": 6}
    assert len(load(name)(**SMALL[name]).layers) == layers[name]


def test_sizes_that_do_not_fit_together_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"width \(33\) must be a multiple of"):
        load(name)(**SMALL[name] | {"width": 33})
